"""Responses that are kept: gone on with, read and deleted, by the gateways of a host and of others."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from nodes.gateway.actor import Gateway
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring
from tests.nodes.gateway.surfaces.openai_events import events_of
from tests.nodes.gateway.test_api_keys import write_keys

TEXT = "what a client says"


class Hosts:
    """Two gateways on host `a`, one on host `b`."""

    def __init__(self, ring: Ring, folder: Path, stack: list[httpx.AsyncClient]) -> None:
        self.ring = ring
        self.folder = folder
        self.a, self.a2, self.b = stack


@asynccontextmanager
async def hosts(folder: Path, **settings: Any) -> AsyncIterator[Hosts]:
    def config(host: str) -> Any:
        return msgspec.structs.replace(
            CONFIG, responses_file=str(folder / f"{host}.sqlite"), responses_store_bytes=20_000, **settings
        )

    async with Ring() as ring:
        names = ["gateway-0.a", "gateway-1.a", "gateway-0.b"]
        for name in names:
            await ring.start(name, Gateway(config(name[-1])))
        gateways = [ring.systems[name].actor for name in names]
        await until(lambda: not any(gateway.service.missing_roles() for gateway in gateways))
        clients = [
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}/v1", timeout=20) for gateway in gateways
        ]
        try:
            yield Hosts(ring, folder, clients)
        finally:
            for client in clients:
                await client.aclose()


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    """Runs a test that is a coroutine function with these hosts."""

    def run(test: Any) -> None:
        async def main() -> None:
            async with hosts(tmp_path) as those:
                await test(those)

        asyncio.run(main())

    return run


async def ask(client: httpx.AsyncClient, text: str = TEXT, **body: Any) -> dict[str, Any]:
    answer = await client.post("/responses", json={"input": text, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


async def test_any_gateway_goes_on_with_a_response(mesh: Hosts) -> None:
    first = await ask(mesh.a, "one ")
    assert first["store"] is True
    assert first["id"].endswith("_a")
    for client in (mesh.a, mesh.a2, mesh.b):
        # The ring says what it was told: the first question, its answer, and this one.
        second = await ask(client, "two ", previous_response_id=first["id"])
        assert said(second) == "one one two "
        assert second["previous_response_id"] == first["id"]
    third = await ask(mesh.a, "three", previous_response_id=second["id"])
    assert said(third) == "one one two one one two three"
    assert third["usage"]["input_tokens"] == len(said(third))


async def test_a_stream_is_stored_before_it_ends(mesh: Hosts) -> None:
    async with mesh.a.stream("POST", "/responses", json={"input": TEXT, "stream": True}) as answer:
        seen = b""
        async for piece in answer.aiter_bytes():
            seen += piece
            if b"response.completed" in seen:
                break
        events = events_of(seen)
        assert (await mesh.a2.get(f"/responses/{events[0]['response']['id']}")).json() == events[-1]["response"]


async def test_what_is_not_to_be_stored_is_not(mesh: Hosts) -> None:
    answer = await ask(mesh.a, store=False)
    assert answer["store"] is False
    assert (await mesh.a.get(f"/responses/{answer['id']}")).status_code == 404
    second = await mesh.a.post("/responses", json={"input": "x", "previous_response_id": answer["id"]})
    assert second.status_code == 404
    assert second.json()["error"]["param"] == "previous_response_id"
    assert second.json()["error"]["code"] == "previous_response_not_found"


async def test_items_by_their_ids(mesh: Hosts) -> None:
    first, second = await ask(mesh.a, "one "), await ask(mesh.b, "two ")
    names = [answer["output"][0]["id"] for answer in (second, first)]
    references = [{"type": "item_reference", "id": name} for name in names]
    user = {"role": "user", "content": "three"}
    for client in (mesh.a2, mesh.b):
        third = await ask(client, input=[*references, user])
        assert said(third) == "two one three"
    # Stored as what they stand for.
    await mesh.a.delete(f"/responses/{first['id']}")
    assert said(await ask(mesh.a, "!", previous_response_id=third["id"])) == "two one threetwo one three!"
    gone = await mesh.a.post("/responses", json={"input": [user, references[1]]})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "input.1")
    for name in ("msg_1", "", names[0] + "1", "../../x_0"):
        none = await mesh.a.post("/responses", json={"input": [{"type": "item_reference", "id": name}]})
        assert none.status_code == 404, name


async def test_read_and_deleted(mesh: Hosts) -> None:
    answer = await ask(mesh.a)
    for client in (mesh.a2, mesh.b):
        assert (await client.get(f"/responses/{answer['id']}")).json() == answer
        refused = await client.get(f"/responses/{answer['id']}", params={"stream": "true", "starting_after": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")
        # SGLang's router passes this on to all of its servers.
        cancelled = await client.post(f"/responses/{answer['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (400, "not_in_background")
    neither = await mesh.b.put(f"/responses/{answer['id']}", json={})
    assert neither.status_code == 405
    assert set(neither.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    gone = await mesh.b.delete(f"/responses/{answer['id']}")
    assert gone.json() == {"id": answer["id"], "object": "response", "deleted": True}
    for client in (mesh.a, mesh.b):
        assert (await client.delete(f"/responses/{answer['id']}")).status_code == 404
        assert (await client.get(f"/responses/{answer['id']}")).status_code == 404
    for name in ("resp_1", "x", "resp_" + "0" * 32, "resp_" + "0" * 32 + "_elsewhere", "resp_" + "0" * 32 + "_b"):
        assert (await mesh.a.get(f"/responses/{name}")).status_code == 404
        assert (await mesh.a.post(f"/responses/{name}/cancel")).status_code == 404


async def test_a_host_that_is_gone(mesh: Hosts) -> None:
    there = await ask(mesh.b)
    assert (await mesh.a.get(f"/responses/{there['id']}")).status_code == 200
    await mesh.ring.kill("gateway-0.b")
    await until(lambda: mesh.ring.systems["gateway-0.a"].actor.service.ctx.members.get("gateway-0.b") is None)
    second = await mesh.a.post("/responses", json={"input": "x", "previous_response_id": there["id"]})
    assert second.status_code == 404


async def test_one_gateway_killed_the_other_of_its_host_answers(mesh: Hosts) -> None:
    first = await ask(mesh.a, "one ")
    await mesh.ring.kill("gateway-0.a")
    for client in (mesh.a2, mesh.b):
        assert said(await ask(client, "two ", previous_response_id=first["id"])) == "one one two "


def test_a_response_belongs_to_its_key(tmp_path: Path) -> None:
    ann, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "bob"))

    async def main() -> None:
        async with hosts(tmp_path, api_key_file=write_keys(tmp_path / "keys", "ann", "bob")) as mesh:
            answer = (await mesh.a.post("/responses", json={"input": TEXT}, headers=ann)).json()
            path, body = f"/responses/{answer['id']}", {"input": "x", "previous_response_id": answer["id"]}
            for client in (mesh.a, mesh.b):
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers=bob)).status_code == 404
                assert (await client.delete(path, headers=bob)).status_code == 404
                assert (await client.post("/responses", json=body, headers=bob)).status_code == 404
                assert (await client.post("/responses", json=body, headers=ann)).status_code == 200
                assert (await client.get(path, headers=ann)).json() == answer

    asyncio.run(main())


async def test_a_store_that_cannot_be_used_stops_nobody(mesh: Hosts) -> None:
    before = await ask(mesh.a)
    await asyncio.to_thread(_of_version_nine, mesh.folder / "b.sqlite")
    answer = await ask(mesh.b)
    assert (said(answer), answer["store"]) == (TEXT, False)
    streamed = await mesh.b.post("/responses", json={"input": TEXT, "stream": True})
    last = events_of(streamed.content)[-1]
    assert (last["type"], last["response"]["store"]) == ("response.completed", False)
    for client in (mesh.a, mesh.b):
        lost = await client.get(f"/responses/{answer['id']}")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "store_unusable")
        assert "version 9" in lost.json()["error"]["message"]
        assert "retry-after" in lost.headers
    assert (await mesh.b.get(f"/responses/{before['id']}")).status_code == 200


def _of_version_nine(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
