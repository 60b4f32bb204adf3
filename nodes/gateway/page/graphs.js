// Ten minutes of figures: a line for each actor that has the figure, broken where it was away; deaths are marks.
const GRAPHS = [
  { name: "tokens_per_s", title: "Tokens/s, computed", roles: ["scheduler"], show: number },
  { name: "first_token_s", title: "Time to first token, mean", roles: ["gateway"], show: seconds },
  { name: "between_tokens_s", title: "Between tokens, mean", roles: ["gateway"], show: seconds },
  { name: "kv_usage", title: "KV in use", roles: ["scheduler"], show: percent, most: 1 },
  { name: "waiting", title: "Waiting requests", roles: ["scheduler", "gateway"], show: number },
];
const GAP_S = 12;  // two samples missing: one may be late

// Samples of the mesh by actor and incarnation; the same one may be told twice, by two gateways.
class History {
  constructor() { this.byActor = new Map(); }

  add(sample) {
    const parts = this.byActor.get(sample.actor) || new Map();
    this.byActor.set(sample.actor, parts);
    const samples = parts.get(sample.epoch) || new Map();
    parts.set(sample.epoch, samples);
    if (!samples.has(sample.number)) samples.set(sample.number, sample);
  }

  forgetBefore(at) {
    for (const [actor, parts] of this.byActor) {
      for (const [epoch, samples] of parts) {
        for (const [key, sample] of samples) if (sample.at < at) samples.delete(key);
        if (!samples.size) parts.delete(epoch);
      }
      if (!parts.size) this.byActor.delete(actor);
    }
  }

  // Of one figure, by actor: pieces of a line, each without a gap and of one incarnation.
  lines(name) {
    const lines = new Map();
    for (const actor of [...this.byActor.keys()].sort()) {
      const pieces = [];
      for (const samples of [...this.byActor.get(actor)].sort(([a], [b]) => a - b).map(([, one]) => one)) {
        let piece = null;
        for (const { at, figures } of [...samples.values()].sort((a, b) => a.number - b.number)) {
          if (figures[name] === undefined) continue;
          if (!piece || at - piece[piece.length - 1][0] > GAP_S) pieces.push((piece = []));
          piece.push([at, figures[name]]);
        }
      }
      if (pieces.length) lines.set(actor, pieces);
    }
    return lines;
  }
}

function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((one) => one * unit).find((one) => one >= value * 0.999);
}

class Graph {
  constructor({ name, title, roles, show, most }) {
    Object.assign(this, { name, title, roles, show, most, cursor: null, drawn: null });
    this.now = make("span", {});
    this.svg = draw("svg", { tabindex: 0, role: "img", "aria-label": title });
    this.keys = make("ul", { className: "keys" });
    this.element = make("div", { className: "graph" }, make("h3", {}, title, this.now), this.svg, this.keys);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.look((event.clientX - box.left) / box.width);
    });
    this.svg.addEventListener("pointerleave", () => this.look(null));
    this.svg.addEventListener("blur", () => this.look(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1 / 120, ArrowRight: 1 / 120 }[event.key];
      if (step) { event.preventDefault(); this.look(Math.min(1, Math.max(0, (this.cursor ?? 1) + step))); }
      if (event.key === "Escape") this.look(null);
    });
  }

  look(cursor) {
    this.cursor = cursor;
    if (this.drawn) this.draw(...this.drawn);
  }

  draw(lines, deaths, now) {
    this.drawn = [lines, deaths, now];
    const width = this.svg.clientWidth || 300, height = 120, begin = now - TEN_MINUTES_S;
    const values = [...lines.values()].flat(2).map(([, value]) => value);
    const most = this.most || roundUp(Math.max(0, ...values));
    const x = (at) => ((at - begin) / TEN_MINUTES_S) * width, y = (value) => height - 16 - (value / most) * (height - 26);
    const parts = [0, 0.5, 1].map((share) => draw("line", { class: "grid", x1: 0, x2: width, y1: y(share * most), y2: y(share * most) }));
    parts.push(draw("text", { x: 2, y: y(most) + 12, class: "label" }, this.show(most)));
    parts.push(draw("text", { x: 2, y: height - 3, class: "label" }, "-10 min"), draw("text", { x: width - 2, y: height - 3, class: "label", "text-anchor": "end" }, "now"));
    for (const { actor, at, reason } of deaths.filter((one) => one.at >= begin)) {
      parts.push(draw("g", {}, draw("title", {}, `${clock(at)} ${actor} died: ${reason}`),
        draw("line", { class: "death", x1: x(at), x2: x(at), y1: 10, y2: height - 16 }),
        draw("path", { class: "cross", d: `M${x(at) - 4} ${height - 16}l4 -7l4 7z` })));
    }
    const keys = [];
    const at = this.cursor === null ? now : begin + this.cursor * TEN_MINUTES_S;
    [...lines].forEach(([actor, pieces], index) => {
      const colour = `s${index % 8}`;
      const d = pieces.map((piece) => piece.map(([when, value], place) => `${place ? "L" : "M"}${x(when).toFixed(1)} ${y(value).toFixed(1)}`).join("")).join("");
      parts.push(draw("path", { class: `line ${colour}`, d }));
      // A line of one point would not be seen.
      for (const [[when, value]] of pieces.filter((piece) => piece.length === 1)) {
        parts.push(draw("circle", { class: `part ${colour}`, cx: x(when), cy: y(value), r: 2.2 }));
      }
      const near = pieces.flat().filter(([when]) => Math.abs(when - at) <= GAP_S).sort(([a], [b]) => Math.abs(a - at) - Math.abs(b - at))[0];
      keys.push(make("li", {}, make("span", { className: `swatch ${colour}` }), `${actor} `, make("b", { textContent: near ? this.show(near[1]) : "-" })));
    });
    if (this.cursor !== null) parts.push(draw("line", { class: "cursor", x1: x(at), x2: x(at), y1: 10, y2: height - 16 }));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    this.keys.replaceChildren(...(keys.length ? keys : [make("li", { className: "quiet", textContent: "nothing yet" })]));
    this.now.textContent = this.cursor === null ? "" : clock(at);
  }
}
