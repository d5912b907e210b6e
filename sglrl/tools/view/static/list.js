// The list of trajectories: filter, order, and only as many elements as are visible.

import { byId, get, make, number, versions } from "./api.js";

const HEIGHT = 26;
const PAGE = 100;
const COLUMNS = [
  ["item", "item"],
  ["#", "sample"],
  ["reward", "reward"],
  ["sampled", "sampled"],
  ["turns", "turns"],
  ["version", "oldest"],
  ["text", "finish"],
];

export class List {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.filter = "";
    this.sort = "";
    this.matched = 0;
    this.pages = new Map();
    this.chosen = null;
    this.round = 0;
    this.view = byId("rows");
    this.space = byId("space");
    this.view.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.view);
    byId("search").addEventListener("submit", (event) => event.preventDefault());
    byId("filter").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.search(byId("filter").value), 150);
    });
    for (const [title, name] of COLUMNS) {
      const button = make("button", { type: "button", title: `sort by ${name}` }, title);
      button.addEventListener("click", () => this.order(name));
      button.dataset.name = name;
      byId("columns").append(button);
    }
  }

  order(name) {
    this.sort = this.sort === name ? `-${name}` : this.sort === `-${name}` ? "" : name;
    for (const button of byId("columns").children) {
      const at = [...byId("columns").children].indexOf(button);
      const sign = this.sort === button.dataset.name ? " ▲" : this.sort === `-${button.dataset.name}` ? " ▼" : "";
      button.textContent = COLUMNS[at][0] + sign;
    }
    this.search(byId("filter").value);
  }

  search(text) {
    this.filter = text;
    if (byId("filter").value !== text) byId("filter").value = text;
    this.view.scrollTop = 0;
    return this.refresh();
  }

  // Asks again for what is visible: after another filter, or when there are more trajectories.
  async refresh() {
    const round = ++this.round;
    const first = Math.floor(this.view.scrollTop / HEIGHT / PAGE) * PAGE;
    for (;;) {
      let found;
      try {
        found = await this.ask(first);
      } catch (error) {
        if (round === this.round) {
          byId("count").textContent = error.message;
          byId("count").className = "error";
        }
        return;
      }
      if (round !== this.round) return;
      byId("count").className = "";
      const more = found.searched < found.of ? `, searched ${number(found.searched)} of ${number(found.of)} ...` : "";
      const loading = found.loading ? `, loading ${found.loading} ...` : "";
      byId("count").textContent = `${number(found.matched)} of ${number(found.total)} trajectories${more}${loading}`;
      if (found.searched >= found.of || found.matched >= first + PAGE || !this.pages.size) {
        this.pages = new Map([[first, found.rows]]);
      }
      this.matched = found.matched;
      this.space.style.height = `${this.matched * HEIGHT}px`;
      this.draw();
      if (found.searched >= found.of) {
        if (!found.loading) return;
        await new Promise((resume) => setTimeout(resume, 400));
      }
    }
  }

  ask(first) {
    const query = new URLSearchParams({ filter: this.filter, sort: this.sort, offset: first, limit: PAGE });
    return get(`/api/rows?${query}`);
  }

  async page(first) {
    if (this.pages.has(first)) return;
    const round = this.round;
    this.pages.set(first, []);
    const found = await this.ask(first);
    if (round === this.round) {
      this.pages.set(first, found.rows);
      this.draw();
    }
  }

  draw() {
    const begin = Math.max(0, Math.floor(this.view.scrollTop / HEIGHT) - 3);
    const end = Math.min(this.matched, begin + Math.ceil(this.view.clientHeight / HEIGHT) + 6);
    const shown = [];
    for (let at = begin; at < end; at++) {
      const first = Math.floor(at / PAGE) * PAGE;
      this.page(first);
      const row = this.pages.get(first)?.[at - first];
      const element = row ? this.element(row) : make("div", { className: "row" }, "...");
      element.style.top = `${at * HEIGHT}px`;
      shown.push(element);
    }
    this.space.replaceChildren(...shown);
  }

  element(row) {
    const chosen = row.row === this.chosen ? " chosen" : "";
    const element = make(
      "div",
      { className: `row${chosen}${row.failed ? " failed" : ""}`, title: row.preview },
      make("span", {}, `${row.item ?? `g${row.group}`}`),
      make("span", {}, row.sample < 0 ? "" : `${row.sample}`),
      make("span", {}, row.failed ? "failed" : number(row.reward)),
      make("span", {}, number(row.sampled)),
      make("span", {}, number(row.turns)),
      make("span", {}, versions(row.oldest, row.newest)),
      make("span", {}, row.preview.trim().replaceAll("\n", " ")),
    );
    element.dataset.row = row.row;
    element.addEventListener("click", () => this.choose(row.row));
    return element;
  }

  choose(row) {
    this.chosen = row;
    this.draw();
    this.onChoose(row);
  }

  // Chooses the row that is `step` places after the chosen one in the list.
  async move(step) {
    let at = -1;
    for (const [first, rows] of this.pages) {
      const found = rows.findIndex((row) => row.row === this.chosen);
      if (found >= 0) at = first + found;
    }
    at = Math.min(this.matched - 1, Math.max(0, at + step));
    const first = Math.floor(at / PAGE) * PAGE;
    await this.page(first);
    const row = this.pages.get(first)?.[at - first];
    if (!row) return;
    const top = at * HEIGHT;
    if (top < this.view.scrollTop || top + HEIGHT > this.view.scrollTop + this.view.clientHeight) {
      this.view.scrollTop = top - this.view.clientHeight / 2;
    }
    this.choose(row.row);
  }
}

// The running samples of a pool, above the list. Elements are kept, so that a click hits its sample.
export class Running {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.elements = new Map();
    this.title = make("h2");
    const titles = ["running", "#", "reward", "sampled", "turns", "state", "seconds"];
    const head = make("div", { className: "row head" }, ...titles.map((title) => make("span", {}, title)));
    byId("running").append(this.title, head);
  }

  show(samples, chosen) {
    const box = byId("running");
    // Once shown, the box keeps its place, so that a click into the list hits its row.
    box.hidden &&= samples.length === 0;
    const shown = samples.toSorted((one, other) => one.started - other.started).slice(0, 200);
    const more = samples.length > shown.length ? `, the first ${shown.length} of them` : "";
    this.title.textContent = `${samples.length} running${more}`;
    const ids = new Set(shown.map((sample) => sample.id));
    for (const [id, element] of this.elements) {
      if (!ids.has(id)) {
        element.remove();
        this.elements.delete(id);
      }
    }
    for (const sample of shown) {
      let element = this.elements.get(sample.id);
      if (!element) {
        element = make("div", { className: "row" });
        element.dataset.live = sample.id;
        element.addEventListener("click", () => this.onChoose(sample.id));
        this.elements.set(sample.id, element);
        box.append(element);
      }
      element.classList.toggle("chosen", sample.id === chosen);
      const { item, sample: index, reward, tokens, turns, doing, started } = sample;
      const seconds = `${(Date.now() / 1000 - started).toFixed(1)} s`;
      const cells = [item ?? "session", index ?? "", number(reward), number(tokens), number(turns), doing, seconds];
      element.replaceChildren(...cells.map((text) => make("span", {}, `${text}`)));
    }
  }
}
