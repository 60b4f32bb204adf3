"""The operator's choice of transports between agents: what falls back, when, and that it is said."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import DeviceUnavailable, PagesElsewhere, PairUnmade, TransferError
from kvstore.pool.device import CPU, CUDA
from kvstore.transfer.base import SourcePages, Transfer, Transport
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.paired.orders import Inbox, Paired, RemotePeer
from kvstore.transfer.paired.transport import PairTransport
from kvstore.transfer.plan import Descriptor
from kvstore.transfer.selection import Selection
from tests.kvstore.fake_links import FakeLinks, FakeWire
from tests.kvstore.transfer.transfers import DEVICE, NEVER, NUM_PAGES, SIZE, Judge, Mail, World, make_pool


class Agent(Mail):
    def __init__(self, world: "SelectionWorld", name: str, choices: dict[str, list[str]]) -> None:
        super().__init__(world, name, Inbox())
        self.links = {
            engine: FakeLinks(world.wires[engine], self.memory, engine)
            for names in choices.values()
            for engine in names
        }
        made = {engine: PairTransport(links, self, 5.0) for engine, links in self.links.items()}
        chosen = {kind: [made[engine] for engine in names] for kind, names in choices.items()}
        self.num_changes = 0
        near = {CPU: ShmTransport(self.host), CUDA: CudaIpcTransport(self.host)}
        self.transport = Selection(near, chosen, self.change)
        self.pools = {}
        for device in (DEVICE, CPU):
            self.pools[device] = make_pool(self.host, device, device, name=f"{name}-{device}")
            self.transport.register(self.pools[device])

    def change(self) -> None:
        self.num_changes += 1

    def attach(self, transport: Paired) -> None:
        self.inbox.transports.append(transport)


BOTH = {CUDA: ["nccl", "tcp"]}


class SelectionWorld(World):
    def __init__(self, near: dict[str, list[str]] = BOTH, far: dict[str, list[str]] = BOTH) -> None:
        super().__init__()
        self.wires = {"nccl": FakeWire(), "tcp": FakeWire()}
        self.near, self.far = Agent(self, "near", near), Agent(self, "far", far)

    def send(self, page: int, device: str = DEVICE, deadline: float = NEVER) -> Transfer:
        peer = self.near.transport.connect(self.far.handle(device, device))
        parts = [Descriptor(page * SIZE, page * SIZE, SIZE)]
        self.far.bytes_of(self.far.pools[device])[page * SIZE : (page + 1) * SIZE] = b"%d" % (page % 10) * SIZE
        source = SourcePages([page], [100 + page])
        transfer = Transfer(self.near.pools[device], peer, parts, deadline, source)
        self.near.transport.post(transfer)
        return transfer

    def page(self, page: int, device: str = DEVICE) -> memoryview:
        return self.near.bytes_of(self.near.pools[device])[page * SIZE :][:SIZE]

    def has(self, page: int, device: str = DEVICE) -> bool:
        return self.page(page, device) == b"%d" % (page % 10) * SIZE

    def num_pairs(self) -> tuple[int, int]:
        return self.wires["nccl"].num_ids, self.wires["tcp"].num_ids


@pytest.fixture
def world() -> SelectionWorld:
    return SelectionWorld()


def test_it_is_a_transport(world: SelectionWorld) -> None:
    transport: Transport = world.near.transport
    outside = Transfer(
        world.near.pools[CPU], world.near.transport.connect(world.far.handle(DEVICE)), [Descriptor(0, -1, 4)], NEVER,
        SourcePages([1], [101]),
    )  # fmt: skip
    with pytest.raises(TransferError, match="outside the pools"):
        transport.post(outside)
    assert world.near.transport.names == ["cuda_ipc", "nccl", "shm", "tcp"]
    with pytest.raises(PagesElsewhere, match="cannot be copied by this agent"):
        Selection({}).connect(world.far.handle(CPU, CPU))
    assert (transport.num_posted, transport.pause_s) == (0, 0.0)
    transport.close()


def test_the_first_choice_is_used_as_long_as_it_works(world: SelectionWorld) -> None:
    assert world.settle() == {}
    handles = [world.send(page) for page in (1, 2)]
    assert world.settle() == dict.fromkeys(handles, "")
    assert world.has(1)
    assert world.num_pairs() == (1, 0)
    pulled = world.near.transport.pulled_bytes
    assert {name for name, num_bytes in pulled.items() if num_bytes} == {"nccl"}
    assert (world.near.transport.fallbacks, world.near.num_changes) == ({}, 0)


@pytest.mark.parametrize("how", ["no NCCL here", "no NCCL there", "in time"])
def test_a_pair_that_cannot_be_made_goes_by_the_second_choice_and_says_so(world: SelectionWorld, how: str) -> None:
    world.wires["nccl"].is_deaf = how == "in time"
    world.near.links["nccl"].is_missing = how == "no NCCL here"
    world.far.links["nccl"].is_missing = how == "no NCCL there"
    first, second = world.send(1), world.send(2)
    ended = world.settle()
    if how == "in time":
        assert (ended, world.near.transport.fallbacks) == ({}, {})
        world.now = 5.0
        ended = world.settle()
    assert ended == {first: "", second: ""}
    assert world.has(1)
    assert world.has(2)
    assert world.near.num_changes == world.near.transport.num_fallbacks == 1
    assert world.near.transport.fallbacks["far"].startswith("tcp instead of nccl: ")
    num_tries = world.wires["nccl"].num_ids
    assert world.end_of(world.send(3)) == ""
    assert world.num_pairs() == (num_tries, 1), "it is not tried again, and one pair of tcp serves all"


def test_when_the_agent_comes_back_the_first_choice_is_tried_again(world: SelectionWorld) -> None:
    world.far.links["nccl"].is_missing = True
    world.send(1)
    world.settle()
    world.far.links["nccl"].is_missing = False
    world.near.transport.agent_lost("somebody else")
    assert world.near.transport.fallbacks
    world.near.transport.agent_lost("far")
    world.far.transport.agent_lost("near")
    assert (world.near.transport.fallbacks, world.near.num_changes) == ({}, 2)
    world.settle()
    assert world.end_of(world.send(2)) == ""
    assert world.num_pairs() == (2, 1)


def test_without_a_second_choice_it_is_a_failure() -> None:
    world = SelectionWorld(near={CUDA: ["nccl"]})
    world.far.links["nccl"].is_missing = True
    assert world.end_of(world.send(1)) == "device_unavailable"
    assert world.num_pairs() == (1, 0)
    world.near.links["nccl"].is_missing = True
    with pytest.raises(TransferError, match="finds no NCCL"):
        world.send(1)


def test_the_other_end_must_have_the_second_choice_too() -> None:
    world = SelectionWorld(far={CUDA: ["nccl"]})
    world.far.links["nccl"].is_missing = True
    assert world.end_of(world.send(1)) == "not_served"


def test_a_second_choice_that_cannot_be_had_here_ends_the_transfer(world: SelectionWorld) -> None:
    world.far.links["nccl"].is_missing = world.near.links["tcp"].is_missing = True
    assert world.end_of(world.send(1)) == "device_unavailable"
    with pytest.raises(PairUnmade):
        world.send(2)


def test_a_pair_that_breaks_at_work_ends_its_transfers_and_nothing_else_is_tried(world: SelectionWorld) -> None:
    world.wires["nccl"].is_slow = True
    handle = world.send(1)
    world.settle()
    world.wires["nccl"].links[1].stop()
    assert world.settle() == {handle: "pair_aborted"}
    assert world.near.transport.fallbacks == {}
    world.wires["nccl"].is_slow = False
    assert world.end_of(world.send(1)) == ""
    assert world.num_pairs() == (2, 0)


def test_what_is_wrong_with_a_pool_is_no_reason_for_another_transport(world: SelectionWorld) -> None:
    peer = world.near.transport.connect(msgspec.structs.replace(world.far.handle(DEVICE), incarnation=2))
    posted = Transfer(world.near.pools[DEVICE], peer, [Descriptor(0, 0, SIZE)], NEVER, SourcePages([1], [101]))
    world.near.transport.post(posted)
    assert world.settle() == {posted: "source_changed"}
    assert world.near.transport.fallbacks == {}


def test_a_transfer_whose_time_is_over_or_that_was_cancelled_does_not_go_on(world: SelectionWorld) -> None:
    world.wires["nccl"].is_deaf = True
    late, cancelled = world.send(1, deadline=4.0), world.send(2)
    world.settle()
    world.near.transport.cancel(cancelled)
    world.now = 4.0
    assert world.settle() == {late: "deadline_exceeded", cancelled: "cancelled"}
    world.now = 5.0
    assert world.settle() == {}
    assert world.num_pairs() == (1, 0)


def test_each_kind_of_memory_has_its_own_choice() -> None:
    choices = {CUDA: ["nccl"], CPU: ["tcp"]}
    world = SelectionWorld(choices, choices)
    on_device, in_memory = world.send(1), world.send(2, CPU)
    assert world.settle() == {on_device: "", in_memory: ""}
    assert world.has(1)
    assert world.has(2, CPU)
    assert world.num_pairs() == (1, 1)
    assert {kind: [one.name for one in far] for kind, far in world.near.transport.far.items()} == choices


def test_draining_and_disconnecting_end_everything_once(world: SelectionWorld) -> None:
    for wire in world.wires.values():
        wire.is_slow = True
    handle = world.send(1)
    world.settle()
    world.near.transport.disconnect(handle.peer)
    assert [(one, one.error.code) for one in world.near.transport.drain() if one.error] == [(handle, "source_lost")]
    assert world.near.transport.num_posted == 0


ENGINES = st.sampled_from(["nccl", "tcp"])
ENDS = st.sampled_from(["near nccl", "far nccl", "near tcp", "far tcp"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(1, NUM_PAGES - 1)),
        st.tuples(st.just("settle"), st.integers(1, 3)),
        st.tuples(st.just("wait"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(1, 6)),
        st.tuples(st.just("lost"), st.sampled_from(["near", "far"])),
        *[st.tuples(st.just(what), ENDS) for what in ("missing", "there")],
        *[st.tuples(st.just(what), ENGINES) for what in ("deaf", "hears", "slow", "step")],
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_every_transfer_ends_once_whatever_fails(steps: list[tuple[str, str | int]]) -> None:
    world = SelectionWorld()
    judge = Judge(lambda page: bytes(world.page(page)), lambda page: b"%d" % (page % 10) * SIZE)
    for what, value in steps:
        if what == "post" and judge.free([int(value)]):
            with contextlib.suppress(DeviceUnavailable, PairUnmade):
                judge.targets[world.send(int(value), deadline=world.now + 12.0)] = [int(value)]
        elif what == "settle":
            judge.take(world.settle(int(value)))
        elif what == "wait":
            world.now += int(value)
        elif what == "cancel":
            for transfer in judge.cancelled(int(value)):
                world.near.transport.cancel(transfer)
        elif what == "lost":
            (world.near if value == "far" else world.far).transport.agent_lost(str(value))
        elif what in ("missing", "there"):
            agent, engine = str(value).split()
            getattr(world, agent).links[engine].is_missing = what == "missing"
        elif what in ("deaf", "hears"):
            world.wires[str(value)].is_deaf = what == "deaf"
        elif what == "slow":
            world.wires[str(value)].is_slow = True
        elif what == "step":
            world.wires[str(value)].step()
        judge.check()
    world.now += 100.0
    judge.take(world.settle(40))
    assert judge.ended == judge.targets.keys()
    assert world.near.transport.num_posted == 0
    assert all(isinstance(one, RemotePeer) for one in [world.near.transport.connect(world.far.handle(DEVICE))])
