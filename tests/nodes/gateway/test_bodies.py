"""Shares of memory and pace of bodies: the rules alone, and an attack on a whole gateway."""

import asyncio
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from nodes.gateway.clients import client_of
from nodes.gateway.http import connection
from nodes.gateway.http.bodies import SMALL_BYTES, ArrivingBody, BodyBudget
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring, play

MIB = 1 << 20
REAL = msgspec.structs.replace(CONFIG, max_buffered_bytes=256 * MIB, max_inflight=2048, body_timeout_s=30.0)
PIECE = 64 << 10


def filled(budget: BodyBudget, client: str, num_bodies: int, num_bytes: int = 8 * MIB) -> int:
    """Bytes that bodies of a client take, each until it is refused or holds `num_bytes`."""
    before = budget.num_bytes
    for body in [budget.open(client, 0.0) for _ in range(num_bodies)]:
        for _ in range(num_bytes // PIECE):
            if body is None or not body.take(PIECE, 0.0):
                break
    return budget.num_bytes - before


def test_one_client_leaves_as_much_as_it_takes() -> None:
    budget = BodyBudget(REAL)
    first = filled(budget, "10.0.0.1", 1000)
    assert first < 256 * MIB * 3 // 4
    assert filled(budget, "10.0.0.2", 4) == 32 * MIB, "four whole bodies of another client"


@pytest.mark.parametrize("num_clients", [1, 2, 5])
def test_many_clients_leave_one_more_its_share(num_clients: int) -> None:
    budget = BodyBudget(REAL)
    for number in range(num_clients):
        filled(budget, f"10.0.1.{number}", 30)
    assert filled(budget, "10.0.0.1", 30) >= 192 * MIB // 2 ** (num_clients + 1)


def test_small_bodies_are_taken_while_large_ones_crowd() -> None:
    """Also those of the client that crowds: behind a proxy all are one."""
    budget = BodyBudget(REAL)
    filled(budget, "10.0.0.1", 100)
    assert filled(budget, "10.0.0.1", 500, SMALL_BYTES) == 500 * SMALL_BYTES


def test_one_client_s_bodies_leave_room_for_others() -> None:
    budget = BodyBudget(REAL)
    held = [budget.open("10.0.0.1", 0.0) for _ in range(2048)]
    assert sum(body is not None for body in held) == 2048 * 2 // 3 + 1
    assert budget.open("10.0.0.1", 0.0) is None
    assert all(budget.open("10.0.0.2", 0.0) for _ in range(400))


Steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 300_000)), max_size=80)


@given(Steps)
def test_what_is_held_is_never_too_much_and_comes_back(steps: list[tuple[int, int, int]]) -> None:
    budget = BodyBudget(msgspec.structs.replace(CONFIG, max_buffered_bytes=MIB, max_inflight=8))
    bodies: dict[int, ArrivingBody] = {}
    for number, client, num_bytes in steps:
        if number not in bodies:
            body = budget.open(f"10.0.0.{client}", 0.0)
            if body is not None:
                bodies[number] = body
        elif num_bytes % 7 == 0:
            bodies[number].close()
            bodies.pop(number).close()
        else:
            bodies[number].take(num_bytes, 0.0)
        assert 0 <= budget.num_bytes <= MIB
        assert budget.num_bodies == len(bodies) <= 8
    for body in bodies.values():
        body.close()
    assert (budget.num_bytes, budget.num_bodies) == (0, 0)
    # By private names: what is left behind for clients that have gone is counted in no figure.
    assert not budget._bodies_of
    assert not budget._large_bytes_of


def test_a_body_that_pauses_is_late_and_one_that_goes_on_is_not() -> None:
    body = BodyBudget(msgspec.structs.replace(REAL, body_pause_s=10.0, min_body_bytes_per_s=1024)).open("x", 100.0)
    assert body.deadline == 110.0
    body.take(10_239, 109.0)
    assert body.deadline == 110.0, "a byte less than enough"
    body.take(1, 109.5)
    assert body.deadline == 119.5
    body.take(10_240, 112.0)
    assert body.deadline == 122.0
    body.take(1_000_000, 121.0)
    assert body.deadline == 130.0, "and the whole has its time"


def test_clients_are_addresses_or_networks_of_ipv6() -> None:
    assert client_of("10.0.0.1") == "10.0.0.1" == client_of("::ffff:10.0.0.1")
    assert client_of("2001:db8::1:2:3:4") == client_of("2001:db8::5") == "2001:db8::/64"
    assert client_of("2001:db8:0:1::5") != client_of("2001:db8::5")
    assert client_of("") == ""
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth1")
    assert client_of("unix:x") == "unix:x"


def test_bodies_that_never_end_cost_others_nothing_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many and as large as would fill all there is, if all of it were theirs."""
    monkeypatch.setattr(connection, "LINGER_S", 0.5)

    async def hog(ring: Ring) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", ring.gateway.port)
        size = ring.config.max_body_bytes
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(b"x" * (size - 1))
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    async def scenario(ring: Ring, client: Any) -> None:
        hogs = [asyncio.ensure_future(hog(ring)) for _ in range(9)]
        held = ring.config.max_buffered_bytes // 3
        await until(lambda: ring.gateway.stats()["mesh_gateway_body_bytes"] >= held)
        answers = [await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert not any(task.done() for task in hogs[:3]), "while they are there"
        heads = [answer[:12] for answer in await asyncio.gather(*hogs)]
        assert set(heads) == {b"HTTP/1.1 408", b"HTTP/1.1 503"}, "closed, after an answer"
        assert ring.gateway.stats()["mesh_gateway_body_bytes"] == 0

    size = 1_000_000
    play(scenario, max_body_bytes=size, max_buffered_bytes=8 * size, body_timeout_s=30.0, body_pause_s=2.0)
