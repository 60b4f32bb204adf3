"""The page at `/` and its events, over a real port."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from mesh.wire.frames import PeerDown
from nodes.gateway.actor import Gateway
from nodes.gateway.page import core
from nodes.gateway.page.core import MAX_PAGES
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring, play
from tests.nodes.gateway.test_api_keys import ALICE, with_keys, write_keys


@pytest.fixture(autouse=True)
def rounds_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "EVERY_S", 0.05)


@asynccontextmanager
async def events(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[AsyncIterator[Any]]:
    async with asyncio.timeout(20), client.stream("GET", "/events/mesh", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def read() -> AsyncIterator[Any]:
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                if line.startswith("data: "):
                    yield name or json.loads(line[6:])

        yield read()


async def first(client: httpx.AsyncClient, **headers: str) -> Any:
    async with events(client, **headers) as read:
        return await anext(read)


async def test_a_page_is_told_the_mesh_its_history_and_its_calls_and_then_what_is_new(ring, client) -> None:
    async with events(client) as read:
        whole = await anext(read)
        assert (whole["model"], whole["gateway"], whole["missing"]) == ("bytes", "g0", [])
        actors = {one["id"]: one for one in whole["actors"]}
        assert {"registry", "g0", "tok0", "d0", "w0", "t0"} == set(actors)
        assert actors["d0"]["answers"]
        assert (actors["d0"]["state"], actors["d0"]["epoch"]) == ("ready", 1)
        assert actors["d0"]["figures"] | {"num_running": 0, "kv_usage": 0.25} == actors["d0"]["figures"]
        assert {one["actor"] for one in whole["samples"]} == {"g0"}, "of fakes only the gateway keeps any"
        assert await anext(read) | {"samples": [], "calls": [], "deaths": []} != whole
        await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        while not (event := await anext(read))["calls"]:
            assert event["samples"] == []
        (call,) = event["calls"]
        assert (call["route"], call["status"], call["gateway"]) == ("/v1/completions", 200, "g0")
        assert call["samples"][0]["spans"][0][0] == "body"
        await ring.kill("w0")
        ring.gateway.on_peer_down(ring.gateway.ctx.address, PeerDown(actor_id="w0", epoch=1, reason="killed <b>"))
        while not (event := await anext(read))["deaths"]:
            assert event["calls"] == []
        assert (event["deaths"][0]["actor"], event["deaths"][0]["reason"]) == ("w0", "killed <b>")
        while event["missing"] != ["no worker is ready"]:
            event = await anext(read)
        assert ring.gateway.stats()["mesh_gateway_pages"] == 1
    await until(lambda: ring.gateway.stats()["mesh_gateway_pages"] == 0)
    assert ring.gateway.service.door.num_calls == 0
    again = await first(client)
    assert len(again["calls"]) == 1
    assert [(one["actor"], one["epoch"]) for one in again["deaths"]] == [("w0", 1)], "it is remembered"


async def test_another_gateway_s_calls_are_told_and_too_many_pages_refused(ring, client) -> None:
    other = (await ring.start("g1", Gateway(CONFIG))).actor
    await until(lambda: not other.service.missing_roles())
    async with events(client) as read, httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.port}") as beside:
        await anext(read)
        other.on_peer_down(other.ctx.address, PeerDown(actor_id="w9", epoch=4, reason="only g1 heard it"))
        while not (event := await anext(read))["deaths"]:
            pass
        assert (event["deaths"][0]["actor"], event["deaths"][0]["epoch"]) == ("w9", 4)
        await beside.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        while not (event := await anext(read))["calls"]:
            pass
        assert [call["gateway"] for call in event["calls"]] == ["g1"]
        streams = [events(client) for _ in range(MAX_PAGES - 1)]
        many = httpx.AsyncClient(base_url=ring.url, limits=httpx.Limits(max_connections=MAX_PAGES + 10))
        async with many:
            opened = [many.stream("GET", "/events/mesh") for _ in streams]
            for one in opened:
                assert (await one.__aenter__()).status_code == 200
            refused = await many.get("/events/mesh")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_pages")
            assert refused.headers["retry-after"]
            for one in opened:
                await one.__aexit__(None, None, None)
        await until(lambda: ring.gateway.stats()["mesh_gateway_pages"] == 1)


async def opened_and_not_read(ring: Ring, version: str = "1.1") -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port, limit=1024)
    writer.write(f"GET /events/mesh HTTP/{version}\r\nHost: x\r\n\r\n".encode())
    await reader.readline()
    return writer


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_drain_says_bye_and_waits_for_no_page_not_even_for_one_that_does_not_read(reuse_port: bool) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        # Each event is then more than what the sockets' buffers hold, after a few of them.
        long = "x" * 400_000
        for number in range(20):
            ring.gateway.ctx.announce(**{f"note{number}": long[:10]})
        writers = [await opened_and_not_read(ring, version) for version in ("1.1", "1.0")]
        ring.gateway._feed._core.take = lambda _: long.encode()
        async with events(client) as read:
            with pytest.raises(json.JSONDecodeError):
                await anext(read)
        for _ in range(30):
            ring.gateway._feed._wake()
            await asyncio.sleep(0.02)
        del ring.gateway._feed._core.take
        async with events(client) as read:
            assert (await anext(read))["gateway"] == "g0"
            began = asyncio.get_running_loop().time()
            await asyncio.wait_for(ring.gateway.drain(), 5)
            assert asyncio.get_running_loop().time() - began < 2.5
            assert [event async for event in read][-1] == "bye"
            if not reuse_port:
                assert (await client.get("/events/mesh")).json()["error"]["code"] == "draining"
        await until(lambda: ring.gateway.stats()["mesh_gateway_pages"] == 0)
        for writer in writers:
            writer.close()

    play(test, reuse_port=reuse_port)


def test_with_keys_the_page_is_public_and_empty_and_a_revoked_key_reads_no_longer(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        page = await client.get("/")
        assert page.status_code == 200
        assert not any(word in page.text for word in ("bytes</", "tok0", "alice"))
        for path in ("/events/mesh", "/events/mesh?key=sk-alice"):
            refused = await client.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        async with events(client, **ALICE) as read:
            assert (await anext(read))["model"] == "bytes"
            write_keys(tmp_path / "keys", "bob")
            async for event in read:
                if "error" in event:
                    break
            assert event["error"]["code"] == "invalid_api_key"
        await until(lambda: ring.gateway.stats()["mesh_gateway_pages"] == 0)

    with_keys(tmp_path, test, "alice")


async def test_the_page_has_a_policy_that_lets_nothing_but_its_own_script_run(ring, client) -> None:
    answer = await client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{hashed}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|\son\w+=", answer.text)
    assert set(re.findall(r"https?://[^\"']+", answer.text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert 'href="metrics"' in answer.text, "it may stand behind a proxy that puts a path before it"


def test_there_is_none_where_it_is_switched_off() -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        for path in ("/", "/events/mesh"):
            assert (await client.get(path)).status_code == 404
        assert "/" not in (await client.get("/openapi.json")).json()["paths"]
        assert "mesh_gateway_pages" in ring.gateway.stats()

    play(test, page=False)
    assert msgspec.structs.replace(CONFIG).page
