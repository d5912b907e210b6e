// The tokens of a conversation, with colours, and what is known of one token.

import { make, number } from "./api.js";

export const COLOURS = ["logprob", "version", "mask", "none"];
const SHOWN = { "\n": "⏎\n", "\t": "⇥\t" };

function shown(text) {
  const made = SHOWN[text] ?? text;
  return made === "" ? "·" : made;
}

// The colour of a token, as CSS.
function colour(by, leaf, at, range) {
  if (!leaf.mask[at]) return by === "mask" && at >= leaf.prompt ? "rgba(128, 128, 128, .22)" : "";
  if (by === "mask") return "rgba(40, 140, 255, .25)";
  if (by === "version") return `hsla(${(leaf.versions[at] * 67) % 360} 70% 55% / .35)`;
  const logprob = leaf.logprobs[at];
  if (by !== "logprob" || logprob === null) return "";
  // From green (certain) to red (logprob of -5 and less).
  return `hsla(${Math.max(0, 120 + Math.max(-5, logprob) * 24)} 75% 50% / .32)`;
}

export class Tokens {
  constructor(onPick) {
    this.onPick = onPick;
    this.box = make("div", { className: "tokens" });
    this.spans = [];
    this.picked = null;
    this.by = COLOURS[0];
    this.box.addEventListener("click", (event) => {
      const at = this.spans.indexOf(event.target.closest("span"));
      if (at >= 0) this.pick(at);
    });
  }

  // Shows a conversation whose tokens before `from` are shown already.
  show(leaf, from = 0) {
    this.leaf = leaf;
    for (const span of this.spans.splice(from)) span.remove();
    const begins = new Set(leaf.turns.map((turn) => turn.start));
    const added = [];
    for (let at = from; at < leaf.ids.length; at++) {
      const span = make("span", {}, shown(leaf.texts[at]));
      if (at < leaf.prompt || !leaf.mask[at]) span.classList.add("given");
      if (begins.has(at)) span.classList.add("begins");
      span.style.backgroundColor = colour(this.by, leaf, at);
      added.push(span);
      this.spans.push(span);
    }
    this.box.append(...added);
    if (this.picked !== null && this.picked < this.spans.length) this.mark(this.picked);
  }

  paint(by) {
    this.by = by;
    this.spans.forEach((span, at) => (span.style.backgroundColor = colour(by, this.leaf, at)));
  }

  mark(at) {
    this.spans[this.picked]?.classList.remove("picked");
    this.picked = at;
    this.spans[at]?.classList.add("picked");
  }

  pick(at) {
    if (at < 0 || at >= this.spans.length) return;
    this.mark(at);
    this.spans[at].scrollIntoView({ block: "nearest" });
    this.onPick(at);
  }
}

// A list of the values of one token.
export function facts(leaf, at) {
  const list = make("dl");
  const add = (name, value) => list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  const code = (text) => make("code", {}, JSON.stringify(text));
  const sampled = Boolean(leaf.mask[at]);
  add("token", code(leaf.texts[at]));
  add("id", `${leaf.ids[at]}`);
  add("position", `${at}`);
  add("mask", sampled ? "sampled" : at < leaf.prompt ? "prompt" : "observed");
  if (sampled) {
    const logprob = leaf.logprobs[at];
    add("logprob", number(logprob));
    add("probability", logprob === null ? "–" : Math.exp(logprob).toPrecision(3));
    add("version", `${leaf.versions[at]}`);
    if (leaf.loras) add("adapter version", `${leaf.loras[at]}`);
  }
  const others = leaf.alternatives[at];
  if (others) {
    const box = make("span");
    for (const [text, logprob] of others.slice(0, 20)) {
      box.append(code(text), logprob === null ? " " : ` ${Math.exp(logprob).toPrecision(2)}  `);
    }
    add(`${others.length} alternatives`, box);
  }
  return list;
}
