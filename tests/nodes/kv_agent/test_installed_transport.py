"""A transport that another distribution brings: found by its entry point, named in the settings, moving pages."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import TransferError, TransportUnusable
from kvstore.pool.page_pool import HeapHost
from kvstore.protocol import PagesPulled
from kvstore.transfer.plugins import TransferContext, load_transport
from nodes.kv_agent.config import ConfigError
from tests.nodes.kv_agent.agent_world import World, config, in_world
from tests.nodes.kv_agent.two_schedulers import SIZE

MODULE = """
from kvstore.pool.device import CPU
from kvstore.transfer.base import Transport
from kvstore.transfer.mapped.peer import MappedPeer

made = []


class Eager(Transport):
    name = "eager"
    kinds = frozenset({CPU})

    def __init__(self, context):
        self.host, self.peers, self.posted, self.num_moved = context.host, [], [], 0
        made.append(self)

    @property
    def num_posted(self):
        return len(self.posted)

    def register(self, pool):
        pass

    def connect(self, handle):
        self.peers.append(MappedPeer(self.host.open(handle.path, writable=False), self))
        return self.peers[-1]

    def disconnect(self, peer):
        if peer in self.peers:
            self.peers.remove(peer)
            peer.pool.close()

    def post(self, transfer):
        transfer.require_inside()
        self.posted.append(transfer)

    def cancel(self, transfer):
        if transfer in self.posted:
            transfer.fail("cancelled", "the transfer was cancelled")

    def poll(self, now):
        ended, self.posted = self.posted, []
        for one in ended:
            for part in one.parts if one.error is None else ():
                there = one.peer.pool.pages_view[part.remote_offset :][: part.num_bytes]
                one.pool.pages_view[part.local_offset :][: part.num_bytes] = there
                one.num_bytes += part.num_bytes
        self.num_moved += sum(one.num_bytes for one in ended)
        return ended

    def drain(self):
        for one in self.posted:
            self.cancel(one)
        return self.poll(0.0)

    def close(self):
        self.drain()
        for peer in list(self.peers):
            self.disconnect(peer)


def broken(context):
    raise OSError("no such engine")


def nothing(context):
    return object()
"""
POINTS = """[kvmesh.transfers]
eager = brought_transport:Eager
broken = brought_transport:broken
nothing = brought_transport:nothing
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of a distribution, on the path of this test only."""
    about = tmp_path / "brought_transport-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought-transport\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (tmp_path / "brought_transport.py").write_text(MODULE)
    monkeypatch.delitem(__import__("sys").modules, "brought_transport", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def world() -> Callable[..., None]:
    return in_world()


async def test_pages_of_another_agent_come_by_an_installed_transport(world: World) -> None:
    near, far = config("cpu", "d", host_transport="eager"), config("cpu", "p")
    source, from_bytes, to_bytes = await world.two(near, far)
    await world.order(source, "agent-0", [8, 9], [4, 5])
    assert await world.scheduler.ends() == PagesPulled(grant_id="g", num_pages=2, complete=True)
    assert to_bytes[4 * SIZE : 5 * SIZE] == from_bytes[8 * SIZE : 9 * SIZE]
    (brought,) = __import__("brought_transport").made
    assert brought.num_moved == 2 * SIZE, "it was this transport, and no other"
    [member] = [one for one in world.scheduler.ctx.members.by_role("kv_agent") if one.actor_id == "agent-0"]
    assert member.attributes["transports"] == ["eager", "shm"]


@pytest.mark.parametrize(
    ("name", "device", "why"),
    [
        ("broken", "cpu", "brought_transport:broken raised OSError: no such engine"),
        ("nothing", "cpu", "returned object, which is not a Transport"),
        ("eager", "cuda:0", "moves cpu pages, not cuda pages"),
    ],
)
async def test_one_that_cannot_be_used_is_named_with_the_reason(world: World, name: str, device: str, why: str) -> None:
    setting = "device_transport" if device != "cpu" else "host_transport"
    with pytest.raises(TransferError, match=why) as caught:
        await world.agent("agent-0", config(device, "d", **{setting: name}))
    assert caught.value.code == "transport_unusable"


def test_a_name_that_nothing_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"\(installed: broken, eager, nothing\), not 'egaer'"):
        config("cpu", "d", host_transport="egaer")


def test_one_that_was_uninstalled_meanwhile_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    context = TransferContext(HeapHost(), None, 1.0)
    with pytest.raises(TransportUnusable, match=r"no transport egaer is installed .*: broken, eager, nothing\)"):
        load_transport("egaer", context)
    monkeypatch.setattr("kvstore.entry_points.entry_points", lambda **_: [])
    with pytest.raises(TransportUnusable, match=r"no transport eager is installed .*: none\)"):
        load_transport("eager", context)
