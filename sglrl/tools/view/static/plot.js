// The plot of the groups' rewards.

import { get } from "./api.js";

// A colour of the style sheet. A canvas does not know light-dark().
function style(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export class Plot {
  constructor(canvas, onGroup) {
    this.canvas = canvas;
    this.data = null;
    canvas.addEventListener("click", (event) => {
      const at = this.at(event.offsetX);
      if (at !== null) onGroup(this.data.group[at]);
    });
    canvas.addEventListener("mousemove", (event) => {
      const at = this.at(event.offsetX);
      if (at === null) return;
      const { group, mean, count, version } = this.data;
      canvas.title = `group ${group[at]}: mean reward ${mean[at].toFixed(3)} of ${count[at]}, version ${version[at]}`;
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  at(x) {
    const count = this.data?.group.length;
    return count ? Math.min(count - 1, Math.floor((x / this.canvas.clientWidth) * count)) : null;
  }

  async load(filter) {
    try {
      this.data = await get(`/api/groups?${new URLSearchParams({ filter })}`);
    } catch {
      return; // The list shows the error of a filter.
    }
    this.draw();
  }

  draw() {
    const { canvas, data } = this;
    const scale = window.devicePixelRatio;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    if (!data?.group.length) return;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const low = data.least.reduce((one, other) => Math.min(one, other), Infinity);
    const high = data.most.reduce((one, other) => Math.max(one, other), -Infinity);
    const y = (value) => height - 6 - ((value - low) / (high - low || 1)) * (height - 24);
    const x = (at) => ((at + 0.5) / data.group.length) * width;
    pen.strokeStyle = style("--line");
    pen.beginPath();
    for (let at = 0; at < data.group.length; at++) {
      pen.moveTo(x(at), y(data.least[at]));
      pen.lineTo(x(at), y(data.most[at]) - 0.5);
    }
    pen.stroke();
    pen.fillStyle = style("--accent");
    for (let at = 0; at < data.group.length; at++) pen.fillRect(x(at) - 1, y(data.mean[at]) - 1, 2, 2);
    // The mean of the groups around each place.
    const window_ = Math.max(1, Math.floor(data.group.length / 40));
    pen.strokeStyle = style("--good");
    pen.lineWidth = 1.5;
    pen.beginPath();
    let total = 0;
    for (let at = 0; at < data.group.length; at++) {
      total += data.mean[at] - (at >= window_ ? data.mean[at - window_] : 0);
      const mean = total / Math.min(at + 1, window_);
      if (at) pen.lineTo(x(at), y(mean));
      else pen.moveTo(x(at), y(mean));
    }
    pen.stroke();
    pen.fillStyle = style("--dim");
    pen.font = "11px system-ui";
    pen.fillText(`reward of ${data.group.length.toLocaleString("en")} groups, ${low.toFixed(2)} to ${high.toFixed(2)}`, 6, 12);
  }
}
