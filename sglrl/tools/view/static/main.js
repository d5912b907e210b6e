// The page: a list of trajectories, and one or two samples beside it.

import { byId, get, listen, make, number } from "./api.js";
import { List, Running } from "./list.js";
import { Plot } from "./plot.js";
import { Sample } from "./sample.js";

const panes = [];
const state = { samples: [], keep: false };
const host = {
  about: {},
  adapters: {},
  choose: (row) => show({ row }),
  list: (filter) => list.search(filter),
  fork: (id) => {
    state.keep = true;
    show({ live: id, tab: "tokens", fork: true });
  },
  ended(pane, row, sample) {
    if (row !== null && row !== undefined) return replace(pane, { row, tab: pane.tab });
    if (sample) pane.fail("This session has ended.");
  },
  buttons(pane) {
    const beside = make("button", { type: "button", title: "The sample that you choose next is shown beside this one (b)", ariaPressed: `${state.keep && panes[0] === pane}` }, "beside");
    beside.addEventListener("click", () => keep(pane));
    const close = make("button", { type: "button", title: "Close" }, "×");
    close.addEventListener("click", () => remove(pane));
    return [beside, close];
  },
};

const list = new List((row) => show({ row }));
const runningSamples = new Running((id) => show({ live: id }));
const plot = new Plot(byId("plot"), (group) => list.search(`group=${group}`));

function keep(pane) {
  state.keep = !state.keep;
  if (pane && panes[0] !== pane) panes.reverse();
  arrange();
  panes.forEach((one) => one.controls());
}

function remove(pane) {
  pane.close();
  panes.splice(panes.indexOf(pane), 1);
  state.keep = false;
  arrange();
}

async function replace(pane, what) {
  pane.close();
  const made = new Sample(host, what);
  panes[panes.indexOf(pane)] = made;
  arrange();
  await made.open();
}

// Shows a sample instead of the last one, or beside the first one if that is kept.
async function show(what) {
  const last = panes.at(-1);
  const wanted = { tab: last?.tab === "timeline" && what.live ? "tokens" : last?.tab, ...what };
  const made = new Sample(host, wanted);
  made.by = last?.by ?? made.by;
  const first = state.keep ? 1 : 0;
  for (const pane of panes.splice(first)) pane.close();
  panes.push(made);
  arrange();
  await made.open();
}

function arrange() {
  const empty = make("p", { className: "empty" }, "Choose a trajectory. j and k go through the list, ? shows all keys.");
  byId("panes").replaceChildren(...(panes.length ? panes.map((pane) => pane.element) : [empty]));
  const hash = panes.map((pane) => (pane.what.live ? `live=${pane.what.live}` : `row=${pane.what.row}`)).join("&");
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
  running();
}

function running() {
  runningSamples.show(state.samples, panes.find((pane) => pane.what.live)?.what.live);
}

async function about() {
  const before = host.about.tokenizer;
  host.about = await get("/api/about");
  headline();
  // Samples that were opened before the tokenizer was loaded show ids.
  if (before === false && host.about.tokenizer) panes.forEach((pane) => replace(pane, { ...pane.what, tab: pane.tab }));
  return host.about.loading;
}

function headline() {
  const { sources, pool, problems, rows, groups, loading } = host.about;
  const parts = [sources.length > 2 ? `${sources.length} sources` : sources.join(", ")];
  parts.push(`${number(rows)} trajectories of ${number(groups)} groups`);
  if (pool) parts.push(`pool of ${pool.model.split("/").at(-1)}`, `version ${host.version ?? pool.version}`);
  if (host.held) parts.push(`held: ${host.held}`);
  if (!host.about.tokenizer && !loading) parts.push("no tokenizer: pass --tokenizer MODEL to see text");
  byId("about").textContent = parts.filter(Boolean).join(" · ");
  byId("problem").textContent = [...problems, host.problem ?? ""].filter(Boolean).join("; ");
}

// Asks for what the header and the plot show, one question at a time, until everything is loaded.
const refresh = oneAtATime(async () => {
  const loading = await about();
  await plot.load(list.filter);
  if (loading) refresh();
}, 400);
const refreshList = oneAtATime(() => list.refresh(), 400);

// Returns a function that runs `work` soon: never twice at a time, and with pauses in between.
function oneAtATime(work, pause) {
  let runs = false;
  let again = false;
  return async function start() {
    again = true;
    if (runs) return;
    runs = true;
    while (again) {
      again = false;
      await work();
      await new Promise((resume) => setTimeout(resume, pause));
    }
    runs = false;
  };
}

// Something has changed in the pool.
function changed(now) {
  state.samples = now.samples;
  Object.assign(host, { version: now.version, adapters: now.adapters, problem: now.problem, held: now.held });
  if (now.rows !== state.rows) {
    state.rows = now.rows;
    refreshList();
    refresh();
  }
  headline();
  running();
}

byId("help").addEventListener("click", () => byId("keys").showModal());
byId("filter").addEventListener("input", () => setTimeout(() => plot.load(list.filter), 200));
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const pane = panes.at(-1);
  const keys = {
    j: () => list.move(1),
    k: () => list.move(-1),
    "/": () => byId("filter").focus(),
    "?": () => byId("keys").showModal(),
    c: () => pane?.select("conversation"),
    t: () => pane?.select("tokens"),
    l: () => pane?.select("timeline"),
    b: () => pane && keep(panes[0]),
    ArrowLeft: () => pane?.tokens.pick((pane.tokens.picked ?? 1) - 1),
    ArrowRight: () => pane?.tokens.pick((pane.tokens.picked ?? -1) + 1),
    f: () => pane?.inspect.querySelector("textarea")?.focus(),
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

await about();
refresh();
refreshList();
arrange();
if (host.about.pool) {
  listen("/api/state", changed, () => (byId("problem").textContent = "sglrl view has ended"));
}
