// When samples ran beside each other: in the engine, in their agent, or waiting, and the weight updates.

import { get, make } from "./api.js";

const COLOURS = { engine: "#3b82f6", tools: "#f59e0b", waiting: "#9ca3af" };
const NAMES = { engine: "engine", tools: "agent and tools", waiting: "waiting for a worker" };
const HEIGHT = 14;
const LEFT = 84;
const TOP = 26;

export async function timeline(row, onChoose) {
  const data = await get(`/api/timeline/${row}`);
  const canvas = make("canvas", { className: "timeline" });
  const legend = make("p", { className: "legend" });
  for (const [name, colour] of Object.entries(COLOURS)) {
    const mark = make("span", {}, "■ ");
    mark.style.color = colour;
    legend.append(mark, `${NAMES[name]}   `);
  }
  legend.append(data.updates.length ? "│ weight update" : "", ". The chosen sample is marked. Click another to show it.");
  const draw = () => paint(canvas, data, row);
  new ResizeObserver(draw).observe(canvas);
  canvas.addEventListener("click", (event) => {
    const sample = data.samples[Math.floor((event.offsetY - TOP) / HEIGHT)];
    if (sample) onChoose(sample.row);
  });
  canvas.style.height = `${TOP + HEIGHT * data.samples.length + 4}px`;
  return make("div", {}, legend, canvas);
}

function paint(canvas, data, row) {
  const scale = window.devicePixelRatio;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const all = data.samples.flatMap((sample) => sample.parts);
  if (!all.length) return;
  const begin = all.reduce((least, part) => Math.min(least, part[1]), Infinity);
  const end = all.reduce((most, part) => Math.max(most, part[2]), -Infinity);
  const x = (time) => LEFT + ((time - begin) / (end - begin || 1)) * (canvas.clientWidth - LEFT - 8);
  const text = getComputedStyle(document.body).color;
  pen.font = "11px system-ui";
  data.samples.forEach((sample, at) => {
    const top = TOP + at * HEIGHT;
    if (sample.row === row) {
      pen.fillStyle = "rgba(59, 130, 246, .15)";
      pen.fillRect(0, top, canvas.clientWidth, HEIGHT);
    }
    pen.fillStyle = text;
    pen.fillText(`${sample.item ?? ""}${sample.sample < 0 ? "" : ` #${sample.sample}`}`.slice(0, 14), 4, top + 11);
    for (const [kind, from, to] of sample.parts) {
      pen.fillStyle = COLOURS[kind];
      pen.fillRect(x(from), top + 2, Math.max(1, x(to) - x(from)), HEIGHT - 4);
    }
  });
  pen.fillStyle = text;
  pen.fillText("0 s", LEFT, 11);
  pen.fillText(`${(end - begin).toFixed(2)} s`, canvas.clientWidth - 52, 11);
  for (const update of data.updates) {
    if (update.end < begin || update.begin > end) continue;
    pen.fillStyle = "rgba(220, 38, 38, .35)";
    pen.fillRect(x(update.begin), 14, Math.max(1.5, x(update.end) - x(update.begin)), canvas.clientHeight);
    pen.fillStyle = text;
    pen.fillText(`v${update.version}`, x(update.begin) + 2, 22);
  }
}
