// The last requests of all gateways. A row is made once and stays, so that focus and what is unfolded stay too.
const MAX_ROWS = 50;
const SPAN_KINDS = [
  ["tokenize", "s0", ["body", "tokenizer's way", "template", "tokenize", "tokenizer"]],
  ["queue", "s1", ["gateway", "submit", "queue", "waiting"]],
  ["grant", "s6", ["grant"]],
  ["prefill", "s2", ["prefill"]],
  ["transfer", "s3", ["transfer"]],
  ["ways between processes", "s7", ["ways"]],
  ["output", "s5", ["output", "finish", "answer"]],
  ["stall", "s4", ["stall"]],
  ["retry after a failure", "bad", ["retry"]],
];
const kindOf = (name) => (SPAN_KINDS.find(([, , names]) => names.includes(name)) || ["", "s7"])[1];

function timeline(spans, total) {
  const svg = draw("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [name, begin, end, note] of spans) {
    const x = Math.min(997, (begin / (total || 1)) * 1000);
    svg.append(draw("rect", { x, y: 1, height: 12, width: Math.max(3, ((end - begin) / (total || 1)) * 1000), class: `part ${kindOf(name)}` },
      draw("title", {}, `${name} ${seconds(end - begin)} ${note}`)));
  }
  return svg;
}

const counted = (num, words) => (num === 1 ? "" : `, ${num} ${words}`);

function storyOf(call) {
  const cell = make("div", { className: "story" });
  const cached = call.cached_tokens ? ` (${call.cached_tokens} cached)` : "";
  cell.append(make("p", { className: "quiet", textContent: `${call.id} at ${call.gateway}: ${call.prompt_tokens} prompt tokens${cached}, ` +
    `${call.output_tokens} output tokens${counted(call.num_samples, "samples")}${counted(call.attempts, "attempts")}, ` +
    `end ${call.code || call.finish || "-"}` }));
  for (const sample of call.samples) {
    const rows = sample.spans.map(([name, begin, end, note]) => make("tr", {},
      make("td", {}, make("span", { className: `swatch ${kindOf(name)}` }), name), make("td", { textContent: seconds(end - begin) }),
      make("td", { textContent: `from ${seconds(begin)}` }), make("td", { textContent: note })));
    if (call.samples.length > 1) cell.append(make("p", { textContent: `${sample.id}: ${sample.tokens} tokens, ${sample.end || "-"}` }));
    cell.append(make("table", {}, make("tbody", {}, ...rows)));
  }
  for (const { actor, at_s: at, reason } of call.deaths) cell.append(make("p", { className: "bad", textContent: `at ${seconds(at)} ${actor} died: ${reason}` }));
  return make("tr", {}, make("td", { colSpan: 7 }, cell));
}

function rowOf(call) {
  const button = make("button", { type: "button", className: "plain", textContent: call.route || call.id });
  button.setAttribute("aria-expanded", "false");
  button.title = call.id;
  const first = call.samples[0] || { spans: [] };
  const end = call.code ? `${call.status} ${call.code}` : String(call.status);
  const row = make("tr", {}, make("td", { textContent: clock(call.at + call.total_s) }), make("td", {}, button),
    make("td", { className: call.status >= 400 || call.code ? "bad" : "", textContent: cut(end, 40) }), make("td", { textContent: seconds(call.total_s) }),
    make("td", { className: "room", textContent: seconds(call.first_token_s) }),
    make("td", { className: "room", textContent: `${call.prompt_tokens}+${call.output_tokens}` }),
    make("td", { className: "wide" }, timeline(first.spans, call.total_s)));
  const one = { row, story: null, at: call.at + call.total_s };
  button.addEventListener("click", () => {
    if (one.story) { one.story.remove(); one.story = null; } else row.after((one.story = storyOf(call)));
    button.setAttribute("aria-expanded", String(Boolean(one.story)));
  });
  return one;
}

class Requests {
  constructor() {
    this.rows = new Map();
    byId("spans").append(...SPAN_KINDS.map(([words, kind]) => make("span", {}, make("span", { className: `swatch ${kind}` }), words)));
  }

  add(calls) {
    const body = byId("calls");
    for (const call of calls) {
      if (this.rows.has(call.id)) continue;
      const one = rowOf(call);
      // Nearly always the newest; another gateway's may come a round later.
      const older = [...this.rows.values()].reverse().find((other) => other.at <= one.at);
      if (older) older.row.before(one.row); else body.append(one.row);
      this.rows.set(call.id, one);
      this.rows = new Map([...this.rows].sort(([, a], [, b]) => a.at - b.at));
    }
    for (const [id, { row, story }] of this.rows) {
      if (this.rows.size <= MAX_ROWS) break;
      row.remove();
      if (story) story.remove();
      this.rows.delete(id);
    }
    byId("no-calls").hidden = this.rows.size > 0;
  }
}
