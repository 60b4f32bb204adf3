// What all parts of the page use. Texts of the mesh are only ever set as text: nothing here makes markup of a string.
const base = typeof location === "undefined" ? "" : location.pathname.replace(/\/+$/, "");
const TEN_MINUTES_S = 600;

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

function seconds(value) {
  if (!isKnown(value) || value < 0) return "-";
  if (value >= 100) return `${Math.round(value)} s`;
  return value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value >= 0.1 ? 0 : 1)} ms`;
}

function amount(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value >= 100 || !unit ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

function number(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(0)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

// Figures that an actor does not have are left out of what is told.
const isKnown = (value) => value !== null && value !== undefined;
const percent = (value) => `${Math.round(value * 100)}%`;
const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);
const cut = (text, most) => (text.length > most ? text.slice(0, Math.max(1, most - 1)) + "…" : text);

// The key stays in this tab: it is sent as a header, and never part of an address.
const keyOf = () => sessionStorage.getItem("kvmesh-key") || "";
const headersWithKey = (others = {}) => (keyOf() ? { ...others, Authorization: `Bearer ${keyOf()}` } : others);

// The events of a stream, each as { event, data }.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const whole = (rest + piece.value).split("\n\n");
      rest = whole.pop();
      for (const text of whole) {
        const lines = text.split("\n");
        const named = lines.find((line) => line.startsWith("event: "));
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) yield { event: named ? named.slice(7) : "", data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
