"""Connections of which nothing is read, at a port for other hosts: ZeroMQ does not abort over them."""

import asyncio
import contextlib
import time

import pytest
import zmq

from mesh.address import Address
from mesh.transport.base import Channel
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from tests.mesh.mesh_under_test import until
from tests.mesh.transport.test_zeromq import Ear

MORE_THAN_IT_TAKES = 5000
TWO_HEARTBEATS_S = 1.2
IDENTITY = b"z#1#" + bytes(8).hex().encode()


@pytest.fixture
@contextlib.asynccontextmanager
async def ear(once_per_process):
    """What a transport on tcp hears; `ear.dial` dials it."""
    transport, ear = ZeroMQTransport(ZeroMQOptions(bind="127.0.0.1")), Ear()
    where = await transport.start(Address("x", 1), ear)
    context, dialed = zmq.Context(), []

    def dial(identity):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(where.data)
        dialed.append(socket)
        return socket

    ear.dial = dial
    try:
        yield ear
    finally:
        for socket in dialed:
            socket.close(0)
        context.term()
        await transport.stop()


async def test_a_peer_may_die_while_the_actor_has_not_read_what_it_sent(ear):
    socket = ear.dial(IDENTITY)
    socket.send(b"hi")
    await until(lambda: ear.heard)
    for _ in range(MORE_THAN_IT_TAKES):
        socket.send(b"hi")
    # The actor is held up: ZeroMQ's thread reads until as much is unread as it may keep, and goes on alone.
    time.sleep(0.1)  # noqa: ASYNC251
    socket.close(0)
    time.sleep(TWO_HEARTBEATS_S)  # noqa: ASYNC251
    await until(lambda: len(ear.heard) > 1000 and ear.num_unknown_down)


async def test_a_connection_may_die_whose_routing_id_another_has_taken(ear):
    first = ear.dial(IDENTITY)
    first.send(b"one")
    await until(lambda: len(ear.heard) == 1)
    second = ear.dial(IDENTITY)
    second.send(b"two")
    await until(lambda: len(ear.heard) == 2)
    for _ in range(MORE_THAN_IT_TAKES):
        first.send(b"nobody reads it")
    first.close(0)
    await asyncio.sleep(TWO_HEARTBEATS_S)
    second.send(b"three")
    await until(lambda: len(ear.heard) == 3)
    assert [bytes(parts[0]) for _, _, parts in ear.heard] == [b"one", b"two", b"three"]
    assert {channel for _, channel, _ in ear.heard} == {Channel.DATA}
