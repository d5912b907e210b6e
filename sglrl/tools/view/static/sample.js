// One pane: a sample as a conversation, as tokens, and in time.

import { get, listen, make, number, versions } from "./api.js";
import { forkForm } from "./fork.js";
import { timeline } from "./timeline.js";
import { COLOURS, facts, Tokens } from "./tokens.js";

const TABS = ["conversation", "tokens", "timeline"];

export class Sample {
  // `host` has about, adapters, and the functions choose(row), fork(id) and ended(pane, row).
  constructor(host, what) {
    this.host = host;
    this.what = what;
    this.tab = what.tab ?? "conversation";
    this.by = COLOURS[0];
    this.leaf = null;
    this.data = null;
    this.title = make("h2");
    this.facts = make("div", { className: "facts" });
    this.bar = make("div", { className: "bar", role: "tablist" });
    this.body = make("div", { className: "body" });
    this.inspect = make("div", { className: "inspect", hidden: true });
    this.element = make("article", { className: "pane" },
      make("div", { className: "head" }, this.title, this.facts, this.bar), this.body, this.inspect);
    this.tokens = new Tokens((at) => this.inspectToken(at));
    this.close = () => {};
  }

  async open() {
    try {
      if (this.what.live) this.follow();
      else this.receive(await get(`/api/rows/${this.what.row}`), true);
    } catch (error) {
      this.fail(error.message);
    }
    return this;
  }

  // Shows a running sample until it ends.
  follow() {
    const path = `/api/live/${encodeURIComponent(this.what.live)}`;
    this.close = listen(path, (change) => {
      if (!change.ended) return this.receive(merged(this.data, change), false, change);
      this.close();
      this.ended = true;
      if (change.error) this.fail(change.error);
      this.host.ended(this, change.row, change.sample);
      this.head();
    }, () => this.fail("the server has ended"));
  }

  receive(data, whole, change = null) {
    const first = this.data === null;
    this.data = data;
    const follows = this.leaf === null || this.leaf >= data.leaves.length - 2;
    if (first || follows) this.leaf = data.leaves.length - 1;
    this.head();
    const from = change?.leaves[this.leaf]?.from ?? 0;
    this.draw(first || whole ? 0 : from, first || whole);
    if (this.what.pick !== undefined && first) this.tokens.pick(this.what.pick);
  }

  get shown() {
    return this.data?.leaves[this.leaf];
  }

  head() {
    const { data, what } = this;
    const sample = data?.sample;
    const row = data?.row;
    const item = row?.item ?? sample?.item;
    const number_ = row ? row.sample : sample?.sample;
    const forked = data?.metadata?.fork_of !== undefined;
    const title = forked || what.fork ? "fork" : item !== undefined && item !== null ? `item ${item}` : "session";
    const of = number_ !== undefined && number_ !== null && number_ >= 0 ? ` sample ${number_}` : "";
    this.title.textContent = title + of;
    if (what.live && !this.ended) {
      this.title.append(make("span", { className: "live" }, `  live: ${sample?.doing ?? "..."}`));
    }
    const parts = [];
    if (row) {
      if (row.failed) parts.push("failed");
      else parts.push(`reward ${number(row.reward)}${named(data)}`);
      parts.push(counted(row.turns, "turn"), `${number(row.sampled)} sampled of ${number(row.prompt + row.tokens)} tokens`);
      parts.push(`version ${versions(row.oldest, row.newest)}`, `${number(row.seconds, 2)} s, ${number(row.engine, 2)} s of it in the engine`);
      if (row.finish) parts.push(`finish: ${row.finish}`);
      parts.push(row.source);
    } else if (sample) {
      parts.push(`reward ${number(sample.reward)}${named(data)}`, counted(sample.turns, "turn"), counted(sample.tokens, "sampled token"));
    }
    parts.push(...metadata(data));
    this.facts.textContent = parts.join(" · ");
    this.controls();
  }

  controls() {
    const tabs = TABS.filter((tab) => tab !== "timeline" || this.what.row !== undefined);
    const buttons = tabs.map((tab) => {
      const button = make("button", { type: "button", role: "tab", ariaSelected: `${tab === this.tab}` }, tab);
      button.addEventListener("click", () => this.select(tab));
      return button;
    });
    this.bar.replaceChildren(...buttons);
    const leaves = this.data?.leaves ?? [];
    if (leaves.length > 1) {
      const choice = make("select", { ariaLabel: "Conversation of this run" });
      leaves.forEach((leaf, at) => choice.append(make("option", { value: at, selected: at === this.leaf }, `branch ${at + 1} of ${leaves.length}`)));
      choice.addEventListener("change", () => {
        this.leaf = Number(choice.value);
        this.draw(0, true);
      });
      this.bar.append(choice);
    }
    if (this.tab === "tokens") {
      const choice = make("select", { ariaLabel: "Colour" });
      for (const by of COLOURS) choice.append(make("option", { value: by, selected: by === this.by }, `colour: ${by}`));
      choice.addEventListener("change", () => this.paint(choice.value));
      this.bar.append(choice);
    }
    if (this.data?.row) {
      const group = make("button", { type: "button", title: "Lists the samples of this group" }, "group");
      group.addEventListener("click", () => this.host.list(`group=${this.data.row.group}`));
      this.bar.append(group);
    }
    this.bar.append(...this.host.buttons(this));
  }

  paint(by) {
    this.by = by;
    this.tokens.paint(by);
  }

  select(tab) {
    if (tab === "timeline" && this.what.row === undefined) return;
    this.tab = tab;
    this.controls();
    this.draw(0, true);
  }

  async draw(from, whole) {
    this.inspect.hidden = this.tab !== "tokens" || this.tokens.picked === null;
    const leaf = this.shown;
    if (!leaf && this.data?.error) return this.fail(this.data.error);
    if (!leaf) return this.body.replaceChildren(make("p", { className: "legend" }, "No token has been sampled yet."));
    if (this.tab === "tokens") {
      const end = this.body.scrollHeight - this.body.scrollTop - this.body.clientHeight < 40;
      if (whole) this.body.replaceChildren(this.tokens.box);
      this.tokens.by = this.by;
      this.tokens.show(leaf, whole ? 0 : from);
      if (end && leaf.running) this.body.scrollTop = this.body.scrollHeight;
    } else if (this.tab === "timeline") {
      this.body.replaceChildren(await timeline(this.what.row, (row) => this.host.choose(row)));
    } else {
      this.body.replaceChildren(...conversation(leaf));
    }
    // The error follows the turns that led to it.
    if (this.data?.error && whole) this.body.append(make("p", { className: "error" }, this.data.error));
  }

  inspectToken(at) {
    this.inspect.hidden = false;
    const { about, adapters } = this.host;
    this.inspect.replaceChildren(facts(this.shown, at), forkForm(this.shown, at, about, adapters, (id) => this.host.fork(id)));
  }

  fail(message) {
    const box = make("p", { className: "error" }, message);
    if (this.data?.leaves?.length) this.body.prepend(box);
    else this.body.replaceChildren(box);
  }
}

function counted(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}

// The rewards of all turns by name, such as " (format 0.5, right 1)".
function named(data) {
  const sums = new Map();
  for (const leaf of data?.leaves ?? []) {
    for (const turn of leaf.turns) {
      for (const { name, value } of turn.rewards) if (name) sums.set(name, (sums.get(name) ?? 0) + value);
    }
  }
  return sums.size ? ` (${[...sums].map(([name, value]) => `${name} ${number(value)}`).join(", ")})` : "";
}

// What the agent has noted, except what the page shows elsewhere.
function metadata(data) {
  const elsewhere = ["item", "sample", "top_logprobs", "fork_of", "text", "sampling"];
  const own = Object.entries(data?.metadata ?? {}).filter(([name]) => !elsewhere.includes(name));
  return own.map(([name, value]) => `${name}: ${JSON.stringify(value).slice(0, 200)}`);
}

// The details of a sample after a change. Tokens before `from` are those of the earlier details.
function merged(before, change) {
  const leaves = change.leaves.map((leaf, index) => {
    const old = before?.leaves[index];
    if (!old || !leaf.from) return leaf;
    const made = { ...leaf };
    for (const name of ["ids", "texts", "mask", "logprobs", "versions", "loras"]) {
      if (leaf[name]) made[name] = (old[name] ?? []).slice(0, leaf.from).concat(leaf[name]);
    }
    return made;
  });
  return { ...change, leaves };
}

// A conversation: its messages, or its turns where it began with text or token ids.
function conversation(leaf) {
  if (leaf.messages) {
    const shown = leaf.messages.map(message);
    const last = leaf.turns.at(-1)?.stop ?? leaf.prompt;
    if (leaf.running) shown.push(part("assistant", "assistant, live", leaf.texts.slice(last).join("")));
    return shown;
  }
  const shown = [part("prompt", "prompt", leaf.texts.slice(0, leaf.prompt).join(""))];
  let at = leaf.prompt;
  const upTo = (end, sampled, title) => {
    if (end > at) shown.push(part(sampled ? "assistant" : "observed", title, leaf.texts.slice(at, end).join("")));
    at = end;
  };
  leaf.turns.forEach((turn, index) => {
    upTo(turn.start, false, "observed");
    const reward = turn.reward ? `, reward ${number(turn.reward)}` : "";
    upTo(turn.stop, true, `turn ${index + 1}: ${turn.finish_reason}, worker ${turn.worker}, ${number(turn.seconds, 2)} s${reward}`);
  });
  upTo(leaf.ids.length, leaf.running, leaf.running ? "live" : "observed");
  return shown;
}

function part(kind, title, text) {
  return make("div", { className: `message ${kind}` }, make("div", { className: "role" }, title), make("div", { className: "text" }, text));
}

function message(said) {
  const box = make("div", { className: `message ${said.role}` }, make("div", { className: "role" }, said.name ? `${said.role} ${said.name}` : said.role));
  const reasoning = said.reasoning_content ?? said.reasoning;
  if (reasoning) box.append(make("div", { className: "text reasoning" }, reasoning));
  const content = said.content;
  if (typeof content === "string" && content) box.append(make("div", { className: "text" }, content));
  else if (content && typeof content !== "string") box.append(make("pre", {}, JSON.stringify(content, null, 1)));
  for (const call of said.tool_calls ?? []) {
    const { name, arguments: given } = call.function ?? call;
    box.append(make("pre", { className: "call" }, `${name}(${typeof given === "string" ? given : JSON.stringify(given)})`));
  }
  return box;
}
