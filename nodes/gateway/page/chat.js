// A conversation by /v1/chat/completions. Reasoning and calls of tools are folded.
class Chat {
  constructor() {
    this.messages = [];
    this.model = "";
    this.asking = null;
    byId("say").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    byId("stop").addEventListener("click", () => this.asking && this.asking.abort());
    byId("anew").addEventListener("click", () => { if (this.asking) this.asking.abort(); this.messages = []; byId("talk").replaceChildren(); });
  }

  turn(who, text) {
    const words = make("span", { textContent: text });
    const turn = make("div", { className: "turn" }, make("b", { textContent: who }), words);
    byId("talk").append(turn);
    return { turn, words };
  }

  body() {
    const body = { model: this.model || undefined, messages: this.messages, stream: true };
    const system = byId("system").value.trim();
    if (system) body.messages = [{ role: "system", content: system }, ...this.messages];
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      const value = byId(name).value;
      if (value !== "") body[name] = Number(value);
    }
    return body;
  }

  async send() {
    const text = byId("text").value.trim();
    if (!text || this.asking) return;
    byId("text").value = "";
    this.messages.push({ role: "user", content: text });
    this.turn("you", text);
    const asking = (this.asking = new AbortController());
    byId("send").disabled = true;
    byId("stop").disabled = false;
    const answer = new Answer(this.turn(this.model || "model", ""));
    try {
      await answer.read(this.body(), asking.signal);
    } catch (error) {
      answer.say(asking.signal.aborted ? "stopped" : `the answer broke: ${error.message || error}`, asking.signal.aborted ? "quiet" : "bad");
    }
    // An answer that was begun is part of the conversation, whoever ended it.
    if (answer.text && this.messages.length) this.messages.push({ role: "assistant", content: answer.text });
    this.asking = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

class Answer {
  constructor({ turn, words }) {
    Object.assign(this, { turn, words, text: "", folds: new Map() });
  }

  say(text, kind) {
    this.turn.append(make("div", { className: kind, textContent: text }));
  }

  fold(key, title) {
    if (!this.folds.has(key)) {
      const pre = make("pre", {}), summary = make("summary", { textContent: title });
      this.turn.insertBefore(make("details", {}, summary, pre), this.words);
      this.folds.set(key, { pre, summary });
    }
    return this.folds.get(key);
  }

  async read(body, signal) {
    const headers = headersWithKey({ "Content-Type": "application/json" });
    const answer = await fetch(base + "/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      throw new Error((said.error && said.error.message) || `status ${answer.status}`);
    }
    let finish = "";
    for await (const { data } of eventsOf(answer.body)) {
      if (data === "[DONE]") { finish = finish || "stop"; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = (chunk.choices || [])[0];
      if (choice) { this.add(choice.delta || {}); finish = choice.finish_reason || finish; }
    }
    if (!finish) throw new Error("the connection ended; send it again");
    if (finish === "length") this.say("cut at its length", "quiet");
  }

  add(delta) {
    const talk = byId("talk"), follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    if (delta.content) { this.text += delta.content; this.words.textContent = this.text; }
    const reasoning = delta.reasoning_content || delta.reasoning;
    if (reasoning) this.fold("reasoning", "reasoning").pre.append(reasoning);
    for (const { index, function: called } of delta.tool_calls || []) {
      const fold = this.fold(`call ${index}`, "call of a tool");
      if (called && called.name) fold.summary.textContent = `calls ${called.name}`;
      if (called && called.arguments) fold.pre.append(called.arguments);
    }
    if (follows) talk.scrollTop = talk.scrollHeight;
  }
}
