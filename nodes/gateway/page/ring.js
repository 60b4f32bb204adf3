// The ring: hosts as frames, in each the roles that it has as boxes with their actors, and arrows with what flows.
const ROLES = ["gateway", "tokenizer", "detokenizer", "scheduler", "worker", "kv_agent"];
const WIDE = [["gateway"], ["tokenizer", "detokenizer"], ["scheduler"], ["worker", "kv_agent"]];
const NARROW = [["gateway", "detokenizer", "kv_agent"], ["tokenizer", "scheduler", "worker"]];
const ROW = 38, HEAD = 24, GAP = 34;

const sumOf = (actors, name) => actors.reduce((sum, one) => sum + (one.figures[name] || 0), 0);

// What flows along an arrow, by the actors in the two boxes that it joins: how much, and the words for it.
const FLOWS = [
  ["gateway", "tokenizer", () => [0, ""]],
  ["gateway", "scheduler", (from, to) => {
    const num = sumOf(to, "num_running") + sumOf(to, "num_waiting");
    return [num, `${num} open`];
  }],
  ["scheduler", "worker", (from) => {
    const rate = sumOf(from, "tokens_per_s");
    return [rate, `${number(rate)} tok/s`];
  }],
  ["scheduler", "detokenizer", (from) => {
    const rate = sumOf(from, "output_tokens_per_s");
    return [rate, `${number(rate)} tok/s`];
  }],
  ["detokenizer", "gateway", (from, to) => [sumOf(to, "num_running"), "text"]],
  // `pulled_per_s` is made from two states, one after the other (`Page.meet`).
  ["kv_agent", "scheduler", (from) => {
    const rate = sumOf(from, "pulled_per_s");
    return [rate, rate ? `KV ${amount(rate)}/s` : "KV"];
  }],
];

// The actors of a mesh by host ("" if there is one), then by role; those of other roles are gathered under "".
function hostsOf(actors) {
  const hosts = new Map();
  for (const one of actors) {
    if (!hosts.has(one.host)) hosts.set(one.host, { "": [], ...Object.fromEntries(ROLES.map((role) => [role, []])) });
    const roles = hosts.get(one.host);
    (ROLES.includes(one.role) ? roles[one.role] : roles[""]).push(one);
  }
  return hosts;
}

const heightOf = (actors) => HEAD + ROW * actors.length + 4;

// Boxes of one host, below `top`: [{ role, x, y, w, h, actors }], and where its frame ends.
function boxesOf(roles, width, top) {
  const columns = width >= 760 ? WIDE : NARROW;
  const between = width >= 760 ? 76 : 46;
  const w = (width - 24 - between * (columns.length - 1)) / columns.length;
  const present = columns.map((column) => column.filter((role) => roles[role].length));
  const boxes = [];
  let bottom = top + 40;
  if (columns === NARROW) {
    let y = top;
    for (let row = 0; row < 3; row += 1) {
      const pair = columns.map((column) => column[row]);
      const h = Math.max(0, ...pair.filter((role) => roles[role].length).map((role) => heightOf(roles[role])));
      pair.forEach((role, index) => {
        if (roles[role].length) boxes.push({ role, x: 12 + index * (w + between), y, w, h: heightOf(roles[role]), actors: roles[role] });
      });
      if (h) y += h + GAP;
    }
    return { boxes, bottom: Math.max(bottom, y - GAP) };
  }
  const heights = present.map((column) => column.reduce((sum, role) => sum + heightOf(roles[role]), 0) + GAP * Math.max(0, column.length - 1));
  const most = Math.max(...heights, 0);
  present.forEach((column, index) => {
    let y = top + (most - heights[index]) / 2;
    for (const role of column) {
      boxes.push({ role, x: 12 + index * (w + between), y, w, h: heightOf(roles[role]), actors: roles[role] });
      y += heightOf(roles[role]) + GAP;
    }
  });
  return { boxes, bottom: Math.max(bottom, top + most) };
}

// Where a line from the range a to the range b leaves and arrives: level if they overlap.
function levels(a, b) {
  const [low, high] = [Math.max(a[0], b[0]), Math.min(a[1], b[1])];
  if (low <= high) return [(low + high) / 2, (low + high) / 2];
  return a[1] < b[0] ? [a[1], b[0]] : [a[0], b[1]];
}

// From box to box: two points on their sides that face each other.
function wayBetween(a, b) {
  const inner = (at, size) => [at + 8, at + size - 8];
  if (a.x + a.w <= b.x || b.x + b.w <= a.x) {
    const [y1, y2] = levels(inner(a.y, a.h), inner(b.y, b.h));
    return a.x < b.x ? [a.x + a.w, y1, b.x, y2] : [a.x, y1, b.x + b.w, y2];
  }
  const [x1, x2] = levels(inner(a.x, a.w), inner(b.x, b.w));
  return a.y < b.y ? [x1, a.y + a.h, x2, b.y] : [x1, a.y, x2, b.y + b.h];
}

// Its role is written above it, so where there is little room that part of its name goes first.
function nameIn({ id, role }, chars) {
  const prefix = `${role.replace("_", "-")}-`;
  return id.length > chars && id.startsWith(prefix) ? cut(id.slice(prefix.length), chars) : cut(id, chars);
}

function actorParts(one, x, y, w) {
  const state = one.gone || !one.answers ? "bad" : one.state === "ready" ? "good" : "warn";
  const { num_running: running, num_waiting: waiting, kv_usage: kv, cpu_cores: cpu } = one.figures;
  const words = [];
  if (one.gone) words.push("gone");
  else if (!one.answers) words.push("does not answer");
  else {
    if (one.state !== "ready") words.push(one.state);
    if (isKnown(running)) words.push(`${running} run`);
    if (waiting) words.push(`${waiting} wait`);
    if (isKnown(kv)) words.push(`KV ${percent(kv)}`);
    else if (isKnown(cpu)) words.push(`CPU ${percent(cpu)}`);
  }
  const load = one.gone ? 0 : Math.min(1, kv ?? cpu ?? 0);
  const chars = Math.floor((w - 30) / 6.2);
  return [
    draw("circle", { cx: x + 12, cy: y + 8, r: 4, class: `dot ${state}` }),
    draw("text", { x: x + 22, y: y + 12 }, nameIn(one, chars)),
    draw("text", { x: x + 22, y: y + 26, class: "quiet", "font-size": 11 }, cut(words.join(" · "), chars + 2)),
    draw("rect", { x: x + 22, y: y + 30, width: w - 34, height: 3, rx: 1.5, class: "rail" }),
    draw("rect", { x: x + 22, y: y + 30, width: (w - 34) * load, height: 3, rx: 1.5, class: "load" }),
  ];
}

function boxParts(box) {
  const parts = [
    draw("rect", { x: box.x, y: box.y, width: box.w, height: box.h, rx: 6, class: "box" }),
    draw("text", { x: box.x + 10, y: box.y + 16, class: "role" }, box.role.replace("_", " ")),
  ];
  box.actors.forEach((one, index) => parts.push(...actorParts(one, box.x, box.y + HEAD + index * ROW, box.w)));
  return parts;
}

function arrowParts(from, to, amount, words) {
  const [x1, y1, x2, y2] = wayBetween(from, to);
  const level = Math.abs(y1 - y2) < Math.abs(x1 - x2);
  const busy = amount > 0 ? " busy" : "", far = from.host === to.host ? "" : " far";
  const parts = [draw("path", { d: `M${x1} ${y1}L${x2} ${y2}`, class: `arrow${busy}${far}`, "marker-end": "url(#tip)" })];
  if (words) {
    // In the gap beside the box that it leaves: in the middle it may lie over another box.
    const side = Math.sign(x2 - x1), wide = Math.min(Math.abs(x2 - x1), 80);
    const place = level ? { x: x1 + (side * wide) / 2, y: y1 - 5, "text-anchor": "middle" } : { x: (x1 + x2) / 2 + 8, y: (y1 + y2) / 2 + 4 };
    parts.push(draw("text", { ...place, class: "label" }, words));
  }
  return parts;
}

// How far each arrow goes: within a host if it has both roles, else from the first host that has the other one.
function arrowsOf(boxes) {
  const found = [];
  for (const [from, to, flow] of FLOWS) {
    const sources = boxes.filter((box) => box.role === from), targets = boxes.filter((box) => box.role === to);
    if (!sources.length || !targets.length) continue;
    const hosts = new Set([...sources, ...targets].map((box) => box.host));
    for (const host of hosts) {
      const a = sources.find((box) => box.host === host) || sources[0];
      const b = targets.find((box) => box.host === host) || targets[0];
      if (!found.some((one) => one.a === a && one.b === b)) found.push({ a, b, flow });
    }
  }
  return found;
}

function ringOf(actors, width) {
  const hosts = hostsOf(actors);
  const frames = [], boxes = [];
  let top = 8;
  for (const [host, roles] of [...hosts].sort(([a], [b]) => (a < b ? -1 : 1))) {
    const others = roles[""].length ? 22 : 0, head = host ? 26 : 14;
    const laid = boxesOf(roles, width, top + head);
    boxes.push(...laid.boxes.map((box) => ({ ...box, host })));
    frames.push({ host, y: top, h: laid.bottom + 12 + others - top, others: roles[""] });
    top = laid.bottom + 12 + others + 16;
  }
  const tip = draw("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    draw("path", { d: "M0 0L8 4L0 8Z", class: "tip" }));
  const svg = draw("svg", { width, height: top, viewBox: `0 0 ${width} ${top}`, role: "img" }, draw("defs", {}, tip));
  const names = actors.map((one) => `${one.id} ${one.gone ? "gone" : one.state}`);
  svg.append(draw("title", {}, `The ring of the mesh: ${names.join(", ")}`));
  for (const frame of frames) {
    svg.append(draw("rect", { x: 0.5, y: frame.y, width: width - 1, height: frame.h, rx: 8, class: "host" }));
    if (frame.host) svg.append(draw("text", { x: 12, y: frame.y + 18, class: "role" }, `host ${frame.host}`));
    let x = 12;
    for (const one of frame.others) {
      const y = frame.y + frame.h - 14, name = cut(one.id, 24);
      if (x + 20 + name.length * 7 > width) break;
      const state = one.gone || !one.answers ? "bad" : one.state === "ready" ? "good" : "warn";
      svg.append(draw("circle", { cx: x + 4, cy: y - 4, r: 4, class: `dot ${state}` }), draw("text", { x: x + 12, y }, name));
      x += 24 + name.length * 7;
    }
  }
  const arrows = arrowsOf(boxes);
  // Arrows between hosts lie behind the boxes that they cross.
  for (const { a, b, flow } of arrows.filter(({ a, b }) => a.host !== b.host)) svg.append(...arrowParts(a, b, flow(a.actors, b.actors)[0], ""));
  for (const box of boxes) svg.append(...boxParts(box));
  for (const { a, b, flow } of arrows.filter(({ a, b }) => a.host === b.host)) svg.append(...arrowParts(a, b, ...flow(a.actors, b.actors)));
  return svg;
}
