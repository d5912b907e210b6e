// The form that continues from a token, apart from the run.

import { make, send } from "./api.js";

const FIELDS = [
  ["temperature", 1, "0.1", "the temperature of the samples; 0 takes the likeliest token"],
  ["top_p", 1, "0.05", "samples only from the likeliest tokens with this probability"],
  ["max_new_tokens", 128, "1", "the largest number of tokens to sample"],
  ["seed", "", "1", "makes the samples repeatable; may be empty"],
];

export function forkForm(leaf, at, about, adapters, onFork) {
  const form = make("form", { className: "fork" });
  if (!about.forks) {
    form.append(make("span", { className: "legend" }, about.pool
      ? "Forks are off, because sglrl view runs with --read-only."
      : "To fork here, run sglrl view with these files and a running pool."));
    return form;
  }
  const text = make("textarea", { placeholder: "Text after this token, or empty", ariaLabel: "Text after this token" });
  const rest = make("button", { type: "button", title: "Puts the text of this turn after the token here, to edit it" }, "edit the rest");
  const turn = leaf.turns.find((one) => one.start <= at && at < one.stop);
  rest.disabled = !turn;
  rest.addEventListener("click", () => (text.value = leaf.texts.slice(at + 1, turn.stop).join("")));
  const options = make("div", { className: "options" });
  const inputs = {};
  for (const [name, value, step, title] of FIELDS) {
    inputs[name] = make("input", { type: "number", value, step, min: 0, name });
    options.append(make("label", { title }, `${name} `, inputs[name]));
  }
  const lora = make("select", { name: "policy" }, make("option", { value: "" }, "model"));
  lora.append(...Object.keys(adapters).map((name) => make("option", { value: name }, `adapter ${name}`)));
  options.append(make("label", { title: "the policy that continues" }, "policy ", lora));
  const button = make("button", { type: "submit" }, "Fork here");
  const error = make("span", { className: "error", role: "alert" });
  options.append(rest, button, error);
  form.append(text, options);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    error.textContent = "";
    const sampling = {};
    for (const [name, input] of Object.entries(inputs)) if (input.value !== "") sampling[name] = Number(input.value);
    try {
      const body = { ids: leaf.ids.slice(0, at + 1), text: text.value, sampling, lora: lora.value, source: location.hash.slice(1) };
      onFork((await send("POST", "/api/forks", body)).id);
    } catch (failed) {
      error.textContent = failed.message;
    }
  });
  return form;
}
