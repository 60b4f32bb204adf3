// Follows /events/mesh at whichever gateway answers, and shows what it says.
const SILENT_S = 6, GHOST_S = 60, HIDDEN_S = 30;
const HEADS = ["actor", "host", "role", "state", "epoch", "pid", "group", "CPU", "memory", "running", "waiting", "KV", "tokens/s"];

class Page {
  constructor() {
    this.history = new History();
    this.requests = new Requests();
    this.chat = new Chat();
    this.graphs = GRAPHS.map((one) => new Graph(one));
    this.state = null;
    this.actors = new Map();
    this.deaths = new Map();
    this.lostAt = null;
    byId("graph-boxes").append(...this.graphs.map((one) => one.element));
    byId("actor-heads").append(...HEADS.map((text) => make("th", { scope: "col", textContent: text })));
    new ResizeObserver(() => this.state && requestAnimationFrame(() => this.draw())).observe(byId("ring-box"));
    document.addEventListener("visibilitychange", () => this.seen());
    byId("keys").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem("kvmesh-key", byId("key").value);
      byId("key").value = "";
      byId("keys").hidden = true;
      if (this.given) this.given();
    });
  }

  say(text, kind) {
    const state = byId("state");
    if (state.textContent !== text) state.textContent = text;
    state.className = kind;
    document.body.classList.toggle("gone", kind === "bad" && this.lostAt !== null);
  }

  // Nobody reads a hidden page: it stops asking after a while, and what it missed is there when it comes back.
  seen() {
    clearTimeout(this.hiding);
    if (!document.hidden) { if (this.resume) this.resume(); return; }
    this.hiding = setTimeout(() => { this.isAway = true; if (this.stop) this.stop.abort(); }, HIDDEN_S * 1000);
  }

  async follow() {
    for (let pause = 0; ; ) {
      if (this.isAway) {
        if (document.hidden) await new Promise((resolve) => { this.resume = resolve; });
        this.isAway = false;
        this.resume = null;
      }
      const ended = await this.read();
      if (this.isAway) continue;
      pause = ended === "bye" ? 0.1 : Math.min(3, pause * 2 || 0.3);
      if (ended === "key") { await this.askKey(); continue; }
      this.lostAt = this.lostAt || Date.now();
      const lost = Date.now() - this.lostAt > 2500;
      this.say(lost ? `gone: no gateway answers since ${clock(this.lostAt / 1000)}` : "connecting again …", lost ? "bad" : "warn");
      if (this.heard) pause = 0.1;
      await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    }
  }

  async read() {
    this.heard = false;
    const stop = (this.stop = new AbortController());
    let watch = setTimeout(() => stop.abort(), SILENT_S * 1000);
    try {
      const answer = await fetch(base + "/events/mesh", { headers: headersWithKey(), cache: "no-store", signal: stop.signal });
      if (answer.status === 401) return "key";
      if (!answer.ok) return "refused";
      for await (const { event, data } of eventsOf(answer.body)) {
        clearTimeout(watch);
        watch = setTimeout(() => stop.abort(), SILENT_S * 1000);
        if (event === "bye") return "bye";
        const told = JSON.parse(data);
        if (told.error) return told.error.code === "invalid_api_key" ? "key" : "lost";
        this.heard = true;
        try {
          this.take(told);
        } catch (error) {
          // A fault of this page is not the mesh's: it must not look like one.
          console.error(error);
        }
      }
      return "lost";
    } catch {
      return "lost";
    } finally {
      clearTimeout(watch);
      stop.abort();
    }
  }

  askKey() {
    byId("refused").textContent = keyOf() ? "The server does not know this key." : "";
    sessionStorage.removeItem("kvmesh-key");
    byId("keys").hidden = false;
    this.say("needs a key", "warn");
    byId("key").focus();
    return new Promise((resolve) => { this.given = resolve; });
  }

  take(told) {
    this.lostAt = null;
    const before = this.state;
    this.state = told;
    for (const sample of told.samples) this.history.add(sample);
    for (const death of told.deaths) {
      const key = `${death.actor}.${death.epoch}`;
      if (!this.deaths.has(key)) this.deaths.set(key, death);
    }
    while (this.deaths.size > 64) this.deaths.delete(this.deaths.keys().next().value);
    this.history.forgetBefore(told.now - TEN_MINUTES_S - 10);
    this.requests.add(told.calls);
    this.meet(told, before);
    this.chat.model = told.model;
    this.draw();
  }

  // Who is away is shown in its place for a while: it usually comes back there.
  meet(told, before) {
    const seconds = before ? Math.max(0.5, told.now - before.now) : 1;
    const pulled = (one) => Object.values(one.figures.pulled_bytes || {}).reduce((sum, value) => sum + value, 0);
    for (const one of told.actors) {
      const known = this.actors.get(one.id);
      const same = known && !known.gone && known.epoch === one.epoch;
      one.figures.pulled_per_s = same ? Math.max(0, pulled(one) - pulled(known)) / seconds : 0;
      one.seenAt = told.now;
    }
    const there = new Set(told.actors.map((one) => one.id));
    for (const [id, one] of this.actors) {
      if (there.has(id)) continue;
      if (told.now - one.seenAt > GHOST_S) this.actors.delete(id);
      else this.actors.set(id, { ...one, gone: true });
    }
    for (const one of told.actors) this.actors.set(one.id, one);
  }

  draw() {
    const { model, context, missing, notes, silent, gateway, now } = this.state;
    document.title = `kvmesh: ${model}`;
    byId("model").textContent = `${model} · ${context}`;
    this.say(missing.length ? `not ready: ${missing.join("; ")}` : `ready · by ${gateway}`, missing.length ? "warn" : "good");
    const lines = [...notes, ...silent.map((host) => `host ${host} does not answer`)];
    byId("notes").textContent = lines.join("\n");
    byId("notes").hidden = !lines.length;
    const actors = [...this.actors.values()].sort((a, b) => (a.id < b.id ? -1 : 1));
    const width = byId("ring-box").clientWidth;
    byId("ring-box").replaceChildren(ringOf(actors, width));
    byId("actor-rows").replaceChildren(...actors.map((one) => this.actorRow(one)));
    const deaths = [...this.deaths.values()].sort((a, b) => b.at - a.at);
    const role = (id) => (this.actors.get(id) || {}).role;
    for (const graph of this.graphs) {
      const found = [...this.history.lines(graph.name)].filter(([id]) => !role(id) || graph.roles.includes(role(id)));
      graph.draw(new Map(found), deaths, now);
    }
    const told = deaths.map(({ actor, epoch, at, reason }) => make("li", { textContent: `${clock(at)} ${actor} (epoch ${epoch}) died: ${reason}` }));
    byId("deaths").replaceChildren(...(told.length ? told : [make("li", { className: "quiet", textContent: "No gateway has heard of a death." })]));
  }

  actorRow(one) {
    const { group, phase, cpu_cores: cpu, memory_bytes: memory, num_running: running, num_waiting: waiting, kv_usage: kv, tokens_per_s: rate } = one.figures;
    const state = one.gone ? "gone" : one.answers ? one.state : "does not answer";
    const known = (value, show) => (isKnown(value) ? show(value) : "-");
    const cells = [one.id, one.host || "-", one.role, state, one.epoch, one.pid, [group, phase].filter(Boolean).join(" ") || "-", known(cpu, percent),
      known(memory, amount), known(running, String), known(waiting, String), known(kv, percent), known(rate, number)];
    return make("tr", {}, ...cells.map((text, index) => make("td", { textContent: String(text), className: index === 3 && state !== "ready" ? "bad" : "" })));
  }
}

if (typeof document !== "undefined" && byId("state")) new Page().follow();
