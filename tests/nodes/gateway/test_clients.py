"""Who a client is, and whose calls are refused when a gateway is full."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.api_keys.entries import ApiKey, sha256_of
from nodes.api_keys.file import write_key_file
from nodes.gateway.admission.in_flight import InFlight, Place
from nodes.gateway.clients import MAX_HOPS, Client, ClientNames
from nodes.protocol import AttemptFailed
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import Ring, play

PROMPT = "the quick brown fox"
PROXIES = ("10.0.0.0/8", "::1")


def address(peer: str, *forwarded: str, trusted: tuple[str, ...] = PROXIES) -> str:
    headers = [(b"host", b"x"), *((b"x-forwarded-for", value.encode("latin-1")) for value in forwarded)]
    return ClientNames(trusted).address(peer, headers)


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("192.0.2.7", (), "192.0.2.7"),
        ("2001:db8:1:2::77", (), "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", (), "192.0.2.7"),
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", ("192.0.2.7",), "192.0.2.7"),
        ("::ffff:10.0.0.1", ("192.0.2.7",), "192.0.2.7"),
        ("::1", ("2001:db8:1:2::77",), "2001:db8:1:2::/64"),
        ("10.0.0.1", ("192.0.2.7:4711",), "192.0.2.7"),
        ("10.0.0.1", ("[2001:db8:1:2::77]:4711",), "2001:db8:1:2::/64"),
        # The last one that is no proxy's: what stands before it the client wrote itself.
        ("10.0.0.1", ("203.0.113.9, 192.0.2.7",), "192.0.2.7"),
        ("10.0.0.1", ("203.0.113.9, 192.0.2.7, 10.2.2.2 , 10.3.3.3",), "192.0.2.7"),
        ("10.0.0.1", ("203.0.113.9", "192.0.2.7, 10.2.2.2"), "192.0.2.7"),
        ("10.0.0.1", ("10.9.9.9, 10.8.8.8",), "10.9.9.9"),
        # Nothing behind what is no address is believed.
        ("10.0.0.1", ("192.0.2.7, unknown",), "10.0.0.1"),
        ("10.0.0.1", ("192.0.2.7, \xff, 10.2.2.2",), "10.2.2.2"),
        ("10.0.0.1", ("",), "10.0.0.1"),
        ("10.0.0.1", (", ".join(["10.9.9.9"] * 5000),), "10.9.9.9"),
        ("10.0.0.1", (", ".join(["192.0.2.7", *["10.9.9.9"] * MAX_HOPS]),), "10.9.9.9"),
        ("", (), ""),
    ],
)
def test_addresses(peer: str, forwarded: tuple[str, ...], expected: str) -> None:
    assert address(peer, *forwarded) == expected


def test_a_forged_header_changes_nothing() -> None:
    for peer in ("192.0.2.7", "2001:db8::1", "not an address"):
        forged = address(peer, "203.0.113.9")
        assert forged == address(peer)
    assert address("10.0.0.1", "192.0.2.7", trusted=()) == "10.0.0.1"


def test_names() -> None:
    names = ClientNames(salt="mesh")
    first, second = names.of(None, "192.0.2.7"), names.of(None, "192.0.2.8")
    assert first != second
    assert first == ClientNames(salt="mesh").of(None, "192.0.2.7"), "at all gateways of a mesh"
    assert first != ClientNames(salt="other").of(None, "192.0.2.7")
    assert "192" not in first.name
    assert names.of(ApiKey("alice", b"", weight=3), "192.0.2.7") == Client("key:alice", 3)
    assert names.of(ApiKey("address", b""), "x").name.startswith("key:")


def test_proxies_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.300"):
        ClientNames(["10.0.0.300"])


# a full gateway


def entered(books: InFlight, name: str, num_requests: int = 1, weight: int = 1) -> Place:
    place = Place(Client(name, weight))
    books.enter(place)
    books.opened(place, [f"{name}-{id(place)}-{n}" for n in range(num_requests)])
    return place


def new(place: Place) -> bool:
    return True


def test_the_newest_of_the_heaviest_gives_way() -> None:
    books = InFlight()
    heavy = [entered(books, "heavy") for _ in range(4)]
    entered(books, "some")
    entered(books, "some")
    assert books.to_refuse(Client("light"), 1, 1, new) == [heavy[3]]
    assert books.to_refuse(Client("light"), 1, 1, lambda one: one is not heavy[3]) == [heavy[2]]
    assert books.to_refuse(Client("heavy"), 1, 1, new) is None, "the newcomer is the heaviest"
    assert books.to_refuse(Client("some"), 2, 1, new) is None, "as heavy as that one is then"
    assert books.to_refuse(Client("some", 2), 2, 1, new) == [heavy[3]]
    assert books.to_refuse(Client("light"), 1, 2, new) == [heavy[3], heavy[2]]
    assert books.to_refuse(Client("light"), 1, 100, new) is None, "not for nothing"
    assert books.to_refuse(Client("light"), 1, 1, lambda _: False) is None, "all of them are being answered"


def test_requests_count_and_not_calls() -> None:
    books = InFlight()
    one = entered(books, "samples", 128)
    for _ in range(20):
        entered(books, "calls")
    assert books.to_refuse(Client("light"), 1, 1, new) == [one]
    books.closed(one, one.request_ids[:127])
    assert books.to_refuse(Client("light"), 1, 1, new) != [one]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5), st.booleans()), max_size=60))
def test_the_books_are_balanced(steps: list[tuple[str, int, bool]]) -> None:
    books, places = InFlight(), list[Place]()
    for name, num, leaves in steps:
        if leaves and places:
            place = places.pop(num % len(places))
            books.leave(place)
            books.leave(place)
            books.closed(place, place.request_ids)
        else:
            places.append(entered(books, name, num))
    assert books.num_calls == len(places)
    assert len(books) == len({place.client.name for place in places})
    for place in places:
        books.leave(place)
    assert (len(books), books.num_calls) == (0, 0)


# over HTTP


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "bytes", "prompt": PROMPT, "max_tokens": len(PROMPT)} | fields


def of(host: str) -> dict[str, str]:
    return {"x-forwarded-for": host}


def clients_of(ring: Ring) -> list[str]:
    return [submit.spec.client for submit in ring.seen.submits]


def test_requests_say_whose_they_are() -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        for host in ("192.0.2.7", "192.0.2.7", "192.0.2.8"):
            (await client.post("/v1/completions", json=body(n=2), headers=of(host))).raise_for_status()
        (await client.get("/health/generate")).raise_for_status()
        seen = clients_of(ring)
        assert len(set(seen[:4])) == 1, "samples are one client's"
        assert seen[4] == seen[5] != seen[0]
        assert seen[6:] == ["health"]

    play(test, trusted_proxies=("127.0.0.1",), client_salt="m")


def test_without_a_trusted_proxy_the_header_is_not_read() -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        for host in ("192.0.2.7", "192.0.2.8"):
            (await client.post("/v1/completions", json=body(), headers=of(host))).raise_for_status()
        assert len(set(clients_of(ring))) == 1

    play(test, trusted_proxies=("192.0.2.0/24",))


def test_a_key_is_a_client_wherever_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_key_file(path, (ApiKey("alice", sha256_of("sk-alice"), weight=7),))

    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        for host in ("192.0.2.7", "192.0.2.8"):
            headers = of(host) | {"authorization": "Bearer sk-alice"}
            (await client.post("/v1/completions", json=body(), headers=headers)).raise_for_status()
        assert {(one.spec.client, one.spec.weight) for one in ring.seen.submits} == {("key:alice", 7)}

    play(test, trusted_proxies=("127.0.0.1",), api_key_file=str(path))


async def post(client: httpx.AsyncClient, host: str, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body(**more), headers=of(host))


@pytest.mark.parametrize("is_held", [False, True])
def test_a_full_scheduler_refuses_one_of_the_heaviest(is_held: bool) -> None:
    """Before it holds the attempt, or afterwards; there is no other scheduler."""

    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        ring.faults.silent = is_held
        ring.faults.refuse_submits = "" if is_held else "over_share"
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body()))
        if is_held:
            await until(lambda: bool(ring.scheduler.held))
            request_id, _ = ring.scheduler.held.popitem()
            ring.scheduler.ctx.tell(
                "g0", AttemptFailed(request_id=request_id, attempt=0, code="over_share", message="as told")
            )
        answer = await asked
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("over_share", "as told")
        ring.faults.silent, ring.faults.refuse_submits = False, ""

    play(test)


def full(stream: bool, fields: dict[str, Any], is_full: Callable[[Ring], bool]) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        ring.faults.silent = True

        heavy = [asyncio.ensure_future(post(client, "192.0.2.7", **fields, stream=stream)) for _ in range(2)]
        await until(lambda: is_full(ring))
        light = asyncio.ensure_future(post(client, "192.0.2.8"))
        done, _ = await asyncio.wait(heavy, return_when=asyncio.FIRST_COMPLETED)
        answer = done.pop().result()
        assert '"over_share"' in answer.text
        assert "max_inflight" in answer.text
        if not stream:
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        again = await post(client, "192.0.2.7", **fields)
        assert (again.status_code, again.json()["error"]["code"]) == (429, "too_many_requests")
        ring.faults.silent = False
        ring.scheduler.wake()
        assert (await light).status_code == 200
        assert sorted(one.result().status_code for one in heavy) == ([200, 200] if stream else [200, 429])
        assert ring.gateway.service.door.num_over_share == 1

    play(test, trusted_proxies=("127.0.0.1",), max_inflight=4 if "n" in fields else 2)


def test_a_first_call_is_taken_though_all_others_are_being_answered() -> None:
    """Out of a reserve, which has an end."""

    async def test(ring: Ring, client: httpx.AsyncClient) -> None:
        ring.faults.step_s = 0.02
        heavy = [asyncio.ensure_future(post(client, "192.0.2.7", n=8)) for _ in range(2)]
        core = ring.gateway.service.core
        await until(lambda: len(core.requests) == 16 and all(one.output_ids for one in core.requests.values()))
        first = asyncio.ensure_future(post(client, "192.0.2.8"))
        await until(lambda: len(core.requests) == 17)
        refused = [await post(client, host) for host in ("192.0.2.7", "192.0.2.8", "192.0.2.9")]
        assert [one.status_code for one in refused] == [429, 429, 429]
        assert [one.status_code for one in [await first, *(await asyncio.gather(*heavy))]] == [200, 200, 200]

    play(test, trusted_proxies=("127.0.0.1",), max_inflight=16)


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_full_of_calls_refuses_one_of_the_heaviest(stream: bool) -> None:
    full(stream, {}, lambda ring: ring.gateway.service.core.num_requests == 2)


def test_a_gateway_full_of_requests_refuses_a_call_of_the_heaviest() -> None:
    full(False, {"n": 2}, lambda ring: ring.gateway.service.core.num_requests == 4)
