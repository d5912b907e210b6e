// Requests to the server of this page, and helpers to make elements.

export async function get(path) {
  return answer(await fetch(path));
}

export async function send(method, path, body) {
  return answer(await fetch(path, { method, body: body === undefined ? undefined : JSON.stringify(body) }));
}

async function answer(response) {
  const text = await response.text();
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error(text);
  }
  if (!response.ok) throw new Error(value.error);
  return value;
}

// Calls back with each event of the server. Returns a function that ends it.
export function listen(path, onValue, onLost) {
  const source = new EventSource(path);
  source.onmessage = (event) => onValue(JSON.parse(event.data));
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED || onLost) {
      source.close();
      onLost?.();
    }
  };
  return () => source.close();
}

// make("div", {className: "row"}, "text", child): text is never read as HTML.
export function make(tag, values = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits);
}

export function versions(oldest, newest) {
  if (newest < 0) return "–";
  return oldest === newest ? `${newest}` : `${oldest}–${newest}`;
}
