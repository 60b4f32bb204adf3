"""Published models, served by whole meshes: greedy texts are those of transformers, whoever is killed."""

import asyncio
import contextlib
import json
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.chaos.chaos_mesh import ChaosMesh
from tests.chaos.streams import Wave
from tests.process.conftest import Host
from tests.real_models.folders import folder_of
from tests.real_models.references import MAX_TOKENS, Reference, References, references
from tests.real_models.texts import CAPITAL, CONVERSATIONS, PROMPTS

pytestmark = [pytest.mark.real_models, pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(300)]

CHATS, COMPLETES = "smollm2-135m-instruct", "gemma-3-270m"
LAYOUTS = {"apart": (), "mixed": ("--mixed", "1")}
OPTIONS = ("--dtype", "float32", "--context-length", "4096", "--served-name", "real", "--kv-memory", "512MiB")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Served:
    """A mesh that serves a model, and what transformers makes of the same weights."""

    layout: str
    mesh: ChaosMesh
    expected: References

    def post(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The greedy answer of at most `MAX_TOKENS` tokens: one document, or the events of a stream."""
        body = {"model": "real", "temperature": 0, "max_tokens": MAX_TOKENS, **body}
        request = urllib.request.Request(
            self.mesh.host.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            if not body.get("stream"):
                return [json.loads(response.read())]
            lines = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line]
            assert lines.pop() == b"[DONE]"
            return [json.loads(line) for line in lines]


@contextlib.contextmanager
def serving(model: str, layout: str) -> Iterator[Served]:
    """A settled mesh, which leaves nothing behind at the end."""
    folder = folder_of(model)
    expected = references(folder)
    # Under /tmp and short: paths of sockets are at most a hundred bytes.
    host = Host(tempfile.mkdtemp(prefix="kr"))
    try:
        process = host.up("--model", str(folder), *OPTIONS, *LAYOUTS[layout], KVMESH_SUPERVISION__RESTART_BUDGET="1000")
        mesh = ChaosMesh(host, process)
        mesh.settled(60.0)
        yield Served(layout, mesh, expected)
        host.ends_well(process)
    finally:
        host.clean()
        shutil.rmtree(host.base)


@pytest.fixture(scope="module", params=[(model, layout) for model in (CHATS, COMPLETES) for layout in LAYOUTS])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(*request.param) as served:
        yield served


chatting = pytest.mark.parametrize("served", [(CHATS, layout) for layout in LAYOUTS], indirect=True)


def told(answer: dict[str, Any]) -> Reference:
    """What a document says, in the terms of a reference."""
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Reference(text, choice["finish_reason"], answer["usage"]["prompt_tokens"])


def test_completions(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        [*answers] = pool.map(lambda prompt: served.post("/v1/completions", prompt=prompt), PROMPTS.values())
    assert dict(zip(PROMPTS, [told(one) for [one] in answers], strict=True)) == served.expected.prompts


@chatting
def test_chats(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        [*answers] = pool.map(lambda chat: served.post("/v1/chat/completions", messages=chat), CONVERSATIONS.values())
    assert dict(zip(CONVERSATIONS, [told(one) for [one] in answers], strict=True)) == served.expected.chats


@chatting
def test_an_answer_ends_by_itself_and_a_stream_of_it_is_the_same(served: Served) -> None:
    [answer] = served.post("/v1/chat/completions", messages=CAPITAL)
    text, finish_reason, _ = told(answer)
    assert "Paris" in text
    assert finish_reason == "stop"
    assert answer["usage"]["completion_tokens"] < MAX_TOKENS
    choices = [event["choices"][0] for event in served.post("/v1/chat/completions", messages=CAPITAL, stream=True)]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert len(choices) > 3, "it came in pieces"


@pytest.mark.parametrize(("kind", "share"), [("prefill", 0.0), ("decode", 0.3)])
def test_a_worker_killed_midway_through_streams(served: Served, kind: str, share: float) -> None:
    victim = f"worker-{kind}-0" if served.layout == "apart" else "worker-mixed-0"
    # A salt of its own keeps what was computed before out of it.
    bodies = [
        {"model": "real", "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "cache_salt": kind}
        for prompt in PROMPTS.values()
    ]
    before = served.mesh.settled()
    wave = Wave(
        served.mesh.port, bodies, at=int(share * len(bodies) * MAX_TOKENS), blow=lambda: served.mesh.strike(victim)
    )
    answers = asyncio.run(wave.run())
    assert wave.num_hit >= len(bodies) // 2, "too few streams ran when the blow fell"
    assert served.mesh.settled(60.0).epochs[victim] == before.epochs[victim] + 1
    assert not [answer.broken for answer in answers if answer.broken]
    found = [Reference(one.text, one.finish_reason or "", one.usage[0] if one.usage else 0) for one in answers]
    assert dict(zip(PROMPTS, found, strict=True)) == served.expected.prompts
