"""/abort_request: what is aborted is answered with what it had, on every surface; whose it is, and where."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from nodes.gateway.actor import Gateway
from nodes.gateway.control import aborts
from nodes.gateway.errors import Unavailable
from nodes.protocol import AbortRequests
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring, play
from tests.nodes.gateway.surfaces.openai_events import events_of
from tests.nodes.gateway.test_api_keys import write_keys

PROMPT = "what a client says at length"
LONG = {"max_new_tokens": 100, "ignore_eos": True}
CHAT = [{"role": "user", "content": PROMPT}]


def generating(client: httpx.AsyncClient, path: str = "/generate", **body: Any) -> asyncio.Task[httpx.Response]:
    if path == "/generate" and not body.keys() & {"text", "input_ids"}:
        body["text"] = PROMPT
    body = {"sampling_params": LONG} | body if path == "/generate" else body
    return asyncio.ensure_future(client.post(path, json=body))


async def abort(client: httpx.AsyncClient, **body: Any) -> None:
    answer = await client.post("/abort_request", json=body)
    assert (answer.status_code, answer.json()) == (200, {}), answer.text


async def is_drawing(ring: Ring, *, least: int = 3) -> None:
    """Every request has some tokens."""
    await until(lambda: bool(ring.scheduler.held) and all(
        len(held.output_ids) >= least for held in ring.scheduler.held.values()
    ))  # fmt: skip


@pytest.fixture
def slow(ring: Any) -> Any:
    """A ring that draws a token every 20 ms, which is two seconds for a request."""

    def run(test: Any) -> None:
        async def slowly(here: Ring, client: httpx.AsyncClient) -> None:
            here.faults.step_s = 0.02
            await test(here, client)

        ring(slowly)

    return run


async def test_it_is_answered_with_what_it_had_and_freed(slow: Ring, client: httpx.AsyncClient) -> None:
    ring = slow
    asked = generating(client, rid="mine", return_logprob=True, sampling_params=LONG)
    await is_drawing(ring)
    await abort(client, rid="mine")
    answer = await asked
    assert answer.status_code == 200
    said = answer.json()
    meta = said["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert meta["id"] == "mine"
    assert PROMPT.startswith(said["text"])
    assert 3 <= len(said["output_ids"]) == meta["completion_tokens"] < 100
    # What trainers take the tokens from.
    assert [entry[1] for entry in meta["output_token_logprobs"]] == said["output_ids"]
    await until(lambda: not ring.scheduler.held)
    # It has ended: nothing is left to be done.
    await abort(client, rid="mine")
    assert len(ring.gateway.service.named) == 0
    ended = ring.gateway.ctx.metrics.value('mesh_requests_ended_total{reason="abort"}')
    assert ended == 1


async def test_a_stream_ends_with_an_event_that_says_so(slow: Ring, client: httpx.AsyncClient) -> None:
    body = {"text": PROMPT, "rid": "mine", "stream": True, "sampling_params": LONG}
    events: list[dict[str, Any]] = []
    async with client.stream("POST", "/generate", json=body) as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 2:
                    await abort(client, rid="mine")
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["output_ids"][: len(events[1]["output_ids"])] == events[1]["output_ids"]


async def test_each_prompt_of_a_list_by_its_own_name(slow: Ring, client: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True, "n": 2}
    listed = generating(client, text=[PROMPT, "b" * 30], rid=["a", "b"], sampling_params=params)
    numbered = generating(client, text=[PROMPT, "b" * 30], rid="r", sampling_params=params | {"n": 1})
    await until(lambda: len(slow.scheduler.held) == 6)
    await is_drawing(slow)
    await abort(client, rid="b")
    await abort(client, rid="r_0")
    said = [(one["meta_info"]["id"], one["meta_info"]["finish_reason"]["type"]) for one in (await listed).json()]
    assert said == [("a-0", "length"), ("a-1", "length"), ("b-0", "abort"), ("b-1", "abort")]
    said = [(one["meta_info"]["id"], one["meta_info"]["finish_reason"]["type"]) for one in (await numbered).json()]
    assert said == [("r_0", "abort"), ("r_1", "length")]


async def test_openais_and_anthropics_routes_say_it_in_their_words(slow: Ring, client: httpx.AsyncClient) -> None:
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 90, "ignore_eos": True, "rid": "mine"},
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "request_id": "mine"},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 90, "ignore_eos": True},
        "/v1/messages": {"messages": CHAT, "max_tokens": 90},
    }
    for path, body in paths.items():
        asked = generating(client, path, **body)
        await is_drawing(slow, least=2)
        # Routes without a field for it know the name that this server gave.
        own = next(iter(slow.scheduler.held)).removesuffix("-0")
        await abort(client, rid=body.get("rid", body.get("request_id", own)))
        answer = (await asked).json()
        if path == "/v1/responses":
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", None)
        elif path == "/v1/messages":
            assert answer["stop_reason"] == "max_tokens"
        else:
            assert answer["choices"][0]["finish_reason"] == "abort"
            assert answer["usage"]["completion_tokens"] >= 2
        await until(lambda: not slow.scheduler.held)
    body = paths["/v1/responses"] | {"stream": True}
    asked = generating(client, "/v1/responses", **body)
    await is_drawing(slow)
    await abort(client, rid=next(iter(slow.scheduler.held)).removesuffix("-0"))
    assert events_of((await asked).content)[-1]["type"] == "response.incomplete"


async def test_before_its_prompt_is_read_or_even_tokenized(ring: Ring, client: httpx.AsyncClient) -> None:
    ring.faults.silent, ring.faults.drop_reads = True, 1000
    body = {"rid": "mine", "return_logprob": True, "logprob_start_len": 0}
    asked = generating(client, **body)
    echoed = generating(client, "/v1/completions", prompt=PROMPT, echo=True, logprobs=1, max_tokens=5, rid="echo")
    await until(lambda: len(ring.seen.submits) == 2)
    for rid in ("mine", "echo"):
        await abort(client, rid=rid)
    said = (await asked).json()
    assert (said["text"], said["output_ids"]) == ("", [])
    assert said["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(said["meta_info"]["input_token_logprobs"]) == 1
    choice = (await echoed).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == (PROMPT, "abort", 1)
    ring.faults.silent, ring.faults.drop_reads = False, 0
    ring.faults.prepare_silent = True
    named = ring.gateway.service.named
    asked = generating(client, rid="mine")
    await until(lambda: len(named) == 1)
    await abort(client, rid="mine")
    ring.faults.prepare_silent = False
    # The tokenizer is asked again; what it prepares has been aborted.
    answer = await asked
    if answer.status_code == 200:
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert answer.status_code == 503
    await until(lambda: not ring.scheduler.held)


BAD: list[tuple[bytes, int, str | None]] = [
    (b"", 400, None),
    (b"[]", 400, None),
    (b'{"rid": 5}', 400, "rid"),
    (b'{"rid": ["a"]}', 400, "rid"),
    (b'{"rid": "' + b"x" * 200 + b'"}', 400, "rid"),
    (b'{"abort_all": "yes"}', 400, "abort_all"),
    (b'{"abort_all": true}', 403, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_bad_input(served: Any, body: bytes, status: int, param: str | None) -> None:
    answer = httpx.post(served.url + "/abort_request", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    if status == 403:
        assert error["code"] == "control_off"
        assert "--control" in error["message"]


def test_what_is_nobodys_is_no_error(served: Any) -> None:
    # The third is what verl sends by default.
    for body in ({}, {"rid": None}, {"rid": "", "abort_all": False}, {"rid": "nobody's"}, {"rid": "x", "new": 1}):
        answer = httpx.post(served.url + "/abort_request", json=body)
        assert (answer.status_code, answer.json()) == (200, {})
    for rid in (["a"], ["a", "b", "c"], ["a", ""], 7, "x" * 129):
        answer = httpx.post(served.url + "/generate", json={"text": ["a", "b"], "rid": rid})
        assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, "rid")


@asynccontextmanager
async def gateways(path: Path, *lines: str, **settings: Any) -> AsyncIterator[tuple[Ring, list[httpx.AsyncClient]]]:
    """Two of them, as those that share a port."""
    keys = {"api_key_file": write_keys(path / "keys", *lines)} if lines else {}
    async with Ring() as ring:
        ring.faults.step_s = 0.02
        names = ["gateway-0", "gateway-1"]
        for name in names:
            await ring.start(name, Gateway(msgspec.structs.replace(CONFIG, **keys, **settings)))
        found: list[Any] = [ring.systems[name].actor for name in names]
        await until(lambda: not any(gateway.service.missing_roles() for gateway in found))
        await until(lambda: all(len(one.ctx.members.by_role("gateway")) > 2 for one in found))
        clients = [httpx.AsyncClient(base_url=f"http://127.0.0.1:{one.port}", timeout=20) for one in found]
        try:
            yield ring, clients
        finally:
            for client in clients:
                await client.aclose()


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def asked_by(client: httpx.AsyncClient, name: str, rid: str) -> asyncio.Task[httpx.Response]:
    body = {"text": PROMPT, "rid": rid, "sampling_params": LONG | {"max_new_tokens": 30}}
    return asyncio.ensure_future(client.post("/generate", json=body, headers=key(name)))


async def ends_of(*asked: asyncio.Task[httpx.Response]) -> list[str]:
    return [(await one).json()["meta_info"]["finish_reason"]["type"] for one in asked]


def test_a_rid_means_its_own_keys_requests_at_every_gateway(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateways(tmp_path, "alice requests=2", "bob", "ops admin", control=True) as (ring, (first, second)):
            asked = [asked_by(first, "alice", "r"), asked_by(first, "bob", "r"), asked_by(second, "alice", "r")]
            await until(lambda: len(ring.scheduler.held) == 3)
            await is_drawing(ring)
            # By way of the gateway that has one of the two, from a key that has all that it may have.
            answer = await second.post("/abort_request", json={"rid": "r"}, headers=key("alice"))
            assert (answer.status_code, answer.content) == (200, b"{}")
            strangers = await second.post("/abort_request", json={"rid": "none"}, headers=key("alice"))
            assert (strangers.status_code, strangers.content) == (200, answer.content)
            assert await ends_of(*asked) == ["abort", "length", "abort"]
            # All of one's own, and with an admin's key everybody's.
            asked = [asked_by(first, "alice", "r"), asked_by(first, "bob", "r")]
            await until(lambda: len(ring.scheduler.held) == 2)
            for name in ("bob", "ops"):
                answer = await second.post("/abort_request", json={"abort_all": True}, headers=key(name))
                assert answer.status_code == 200
            assert await ends_of(*asked) == ["abort", "abort"]

    asyncio.run(main())


def test_without_control_an_admin_aborts_its_own_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateways(tmp_path, "alice", "ops admin") as (ring, (first, second)):
            asked = [asked_by(first, "alice", "r"), asked_by(first, "ops", "r")]
            await until(lambda: len(ring.scheduler.held) == 2)
            await second.post("/abort_request", json={"abort_all": True}, headers=key("ops"))
            assert await ends_of(*asked) == ["length", "abort"]

    asyncio.run(main())


def test_a_gateway_that_died_has_nothing_left_and_one_that_is_mute_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborts, "_ASK_S", 0.2)

    async def main() -> None:
        async with gateways(tmp_path) as (ring, (first, _)):
            other: Any = ring.systems["gateway-1"].actor
            monkeypatch.setattr(type(other), "on_ask", lambda self, call: None)
            answer = await first.post("/abort_request", json={"rid": "r"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_unreachable")
            here: Any = ring.systems["gateway-0"].actor
            with pytest.raises(Unavailable):
                await here._aborts.everywhere(AbortRequests(rid="r"))
            monkeypatch.undo()
            await ring.kill("gateway-1")
            await until(lambda: here.ctx.members.get("gateway-1") is None)
            assert (await first.post("/abort_request", json={"rid": "r"})).status_code == 200

    asyncio.run(main())


def test_a_scheduler_that_is_away_delays_no_abort() -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        ring.faults.step_s = 0.02
        asked = generating(client, rid="mine")
        await is_drawing(ring)
        await ring.kill("d0")
        await abort(client, rid="mine")
        said = (await asked).json()
        assert said["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(said["output_ids"]) >= 3

    play(test)
