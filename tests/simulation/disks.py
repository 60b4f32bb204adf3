"""Scenarios in which agents keep pages on disk, and clients want what an earlier mesh has left there.

Whatever dies, and whatever the disk does (`bad_disks.py`): each page that is read from it is what its hash says, or the
answers show it, since `echo` reads them from the pages. So that pages of another salt or other numerics show, too, what
lies under their names there is wrong. Pools are small, so much is stored and read again.

Every third mesh is one whose groups' memory is released and resumed (`releases.py`), most often while a disk reads.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from typing_extensions import override

from kvstore.protocol import MapPool
from kvstore.store.page_store import PageStore
from kvstore.store.place import StoreIdentity
from kvstore.store.source import StoreTransport
from kvstore.transfer.base import Transfer
from mesh.actor import Call
from mesh.simulation.faults import Faults
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import DiskConfig, KVAgentConfig
from nodes.kv_agent.events import Event, GroupReleased, SourceId
from nodes.kv_agent.stores.opening import OpenedStore, feed_store
from nodes.scheduler.config import SchedulerConfig
from tests.simulation import releases, scenario
from tests.simulation.bad_disks import TROUBLES, BadFiles, DiskLane, fill, require_right
from tests.simulation.scenario import Client
from tests.simulation.whole_mesh import SimulatedMesh

OTHER_NUMERICS = "echo of another instruction set"
SALTS = ("", "of one client", "of another")
MOST_DEATHS = 3


class DiskAgent(KVAgent):
    """An agent that `opens` stores of these numerics when it starts, as if groups that compute so were there."""

    opens: list[str]
    counts: Counter[str]
    freed: Callable[[str], None]

    @override
    async def start(self) -> None:
        await super().start()
        assert self.stores is not None
        stores = self.stores.stores
        for identity in {stores.identity(group, numerics): 0 for group in self.ranks for numerics in self.opens}:
            self.ctx.spawn(stores.open(identity), name="open a store early")

    @override
    def feed(self, event: Event) -> None:
        if isinstance(event, GroupReleased):
            self.counts["released while pages were read"] += self._is_reading(event.group)
        super().feed(event)

    @override
    def on_ask(self, call: Call) -> None:
        if isinstance(call.message, MapPool):
            self.counts["mapped while pages were read"] += self._is_reading(call.message.group)
        super().on_ask(call)

    @override
    def unmap(self, source: SourceId) -> None:
        # Its pool is about to be freed, or to be made anew.
        self.freed(source.group)
        super().unmap(source)

    def _is_reading(self, group: str) -> bool:
        live = [one.grant for one in self.core.sessions if not one.is_quiesced]
        return any(grant.stored is not None and grant.group == group for grant in live)


@dataclass
class DiskMesh(SimulatedMesh):
    """A mesh whose agent has one disk. `left` are prompts and salts of which an earlier mesh has left pages there."""

    left: list[tuple[list[int], str]] = field(default_factory=list[tuple[list[int], str]])
    salts: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draw = random.Random(f"disk/{self.seed}")
        self.counts: Counter[str] = Counter()
        self.files: dict[StoreIdentity, BadFiles] = {}
        self.most_s = self.draw.choice((0.001, 0.02, 0.3, 1.0, 4.0))
        self.writes_s = self.most_s * self.draw.choice((0.01, 1.0))
        self.num_slots = self.draw.choice((6, 8, 20, 60, 200))
        self.opens = [OTHER_NUMERICS, *self.draw.choice(([], ["echo"]))]
        self.stores = self.draw.choice(("write_through", "write_through", "write_through_selective"))
        self.troubles = [one for one in TROUBLES if self.draw.random() < 0.3]
        self.rate = self.draw.choice((0.02, 0.2))
        self.wrong: set[bytes] = set()
        self.problems: list[str] = []
        self._opened: list[tuple[BadFiles, PageStore]] = []
        self._reading: dict[str, list[Transfer]] = {}
        self._given_up: set[Transfer] = set()
        self._num_deaths = self.draw.choice((0, 1, MOST_DEATHS))
        self._read_begins = asyncio.Event()
        # Where computing is quicker than the disk nothing is read, and nobody waits for what others read.
        least_ms = 30 if self.most_s < 0.1 else 300
        slow = {group: max(step_ms, least_ms) for group, step_ms in self.speeds.step_ms.items()}
        self.speeds = self.speeds._replace(step_ms=slow)
        self._is_quiet = self.faults == Faults(silent_down=self.faults.silent_down)

    @override
    def _agent_config(self, groups: list[str]) -> KVAgentConfig:
        disk = DiskConfig(directory="/disk", size_bytes=1, bytes_per_s=self.draw.choice((0.0, 0.0, 4096.0)))
        return msgspec.structs.replace(super()._agent_config(groups), disk=disk)

    @override
    def _agent(self, agent: str, groups: list[str]) -> KVAgent:
        made = DiskAgent(self._agent_config(groups), self.memory_of(agent), open_store=self._open)
        made.opens, made.counts, made.freed = self.opens, self.counts, self._freed
        # What an earlier one was reading ended with it.
        self._reading.clear()
        self._given_up.clear()
        return made

    @override
    def _scheduler(self, group: str, spec: Any) -> SchedulerConfig:
        return msgspec.structs.replace(super()._scheduler(group, spec), stores=self.stores)

    async def _open(self, config: DiskConfig, identity: StoreIdentity, wake: Callable[[], None]) -> OpenedStore:
        # A start waits for it, and so do requests, whose time is bounded.
        await asyncio.sleep(min(1.0, self.draw.uniform(0.0, 2 * self.most_s)))
        if identity in self.files:
            self.files[identity].come_back()
        else:
            self.files[identity] = self._first_files(identity)
        files = self.files[identity]
        reads, checks = (DiskLane(self.draw, most_s, orders=True) for most_s in (self.most_s, self.writes_s))
        page_bytes = identity.page_bytes * identity.tp_size
        store = PageStore(files, page_bytes, wake, lanes=(reads, checks, DiskLane(self.draw, self.writes_s)))
        self._opened.append((files, store))
        opened = feed_store(store, config)
        self._watch(opened.transport)
        return opened

    def _first_files(self, identity: StoreIdentity) -> BadFiles:
        page_bytes = identity.page_bytes * identity.tp_size
        files = BadFiles(self.num_slots, page_bytes, self.draw, self.troubles, self.rate, self.counts)
        if identity.numerics == OTHER_NUMERICS:
            self.wrong |= fill(files, identity, self.left, shift=1)
            return files
        # Days ago other pages had the same slots and sequences.
        fill(files, identity, reversed(self.left))
        files.keep_copy()
        files.clear()
        fill(files, identity, self.left)
        strange = set(SALTS[:2]) - set(self.salts)
        self.wrong |= fill(files, identity, [(tokens, salt) for tokens, _ in self.left for salt in strange], shift=1)
        return files

    @override
    async def until_due(self, after_s: float) -> None:
        await super().until_due(after_s)
        self._read_begins.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read_begins.wait(), self.draw.choice((0.0, 3.0, 3.0)))
        await asyncio.sleep(self.most_s * self.draw.random())

    # restores

    def _watch(self, transport: StoreTransport) -> None:
        post, poll, cancel = transport.post, transport.poll, transport.cancel

        def posted(transfer: Transfer) -> None:
            if not transfer.peer.info.layout.tp_rank:
                self._begun(transfer)
            post(transfer)

        def polled(now: float) -> list[Transfer]:
            ended = poll(now)
            for transfer in ended:
                if not transfer.peer.info.layout.tp_rank:
                    self._ended(transfer)
            return ended

        def cancelled(transfer: Transfer) -> None:
            if not transfer.peer.info.layout.tp_rank:
                self._given_up.add(transfer)
            cancel(transfer)

        transport.post = posted  # type: ignore[method-assign]
        transport.poll = polled  # type: ignore[method-assign]
        transport.cancel = cancelled  # type: ignore[method-assign]

    def _begun(self, transfer: Transfer) -> None:
        group = transfer.pool.info.group
        reading = self._reading.setdefault(group, [])
        # One that was given up may go on beside the next. Its error alone does not tell: what the disk has read, and a
        # busy agent has not heard of, gets none by a cancel. What is lost on the way may be given up here alone.
        going_on = [one for one in reading if one.error is None and one not in self._given_up]
        if self._is_quiet and any(_slots(one) & _slots(transfer) for one in going_on):
            self.problems.append(f"slots {_slots(transfer)} are read twice at once into pages of {group}")
        reading.append(transfer)
        self._read_begins.set()
        self.counts["restores begun"] += 1
        if self._num_deaths and self.draw.random() < 0.3:
            self._num_deaths -= 1
            engine = [f"scheduler-{group}", f"worker-{group}"]
            dying = self.draw.choice(
                [engine[:1], engine[:1], engine[1:], engine, ["kv-agent-0"], ["kv-agent-0", engine[0]]]
            )
            self.moments.die_soon("died in a restore", dying, 3 * self.most_s * self.draw.random())

    def _ended(self, transfer: Transfer) -> None:
        group = transfer.pool.info.group
        self._reading[group].remove(transfer)
        self._given_up.discard(transfer)
        if transfer.error is None:
            self.counts["pages restored"] += len(_slots(transfer))
        else:
            self.counts["restores failed"] += 1
            self.counts[f"restore: {transfer.error.code}"] += 1

    def _freed(self, group: str) -> None:
        if self._reading.get(group):
            self.problems.append(f"the pool of {group} is freed while the disk is read into it")

    # the end

    @override
    async def settle(self) -> None:
        for files in self.files.values():
            files.end()
        await super().settle()

    @override
    async def stop(self) -> None:
        await super().stop()
        for identity, files in self.files.items():
            self.counts["pages stored"] += require_right(identity, files, self.wrong)
        for files, store in self._opened:
            num_corrupt = store.stats().get("read corrupt", 0)
            assert files.is_damaged or not num_corrupt, f"{num_corrupt:g} pages of a sound disk counted as corrupt"
        assert not self.problems, self.problems


def _slots(transfer: Transfer) -> set[int]:
    assert transfer.source is not None
    return set(transfer.source.pages)


class Stage:
    """The clients of a seed, and the mesh that has pages of theirs on its disk."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"disks/{seed}")
        self._salts = self._draw.choice((SALTS[:1], SALTS[1:2], SALTS[1:]))
        self._left: list[tuple[list[int], str]] = []
        self.mesh: DiskMesh | None = None

    def clients(self, _seed: int, clients: list[Client]) -> list[Client]:
        """Some come again a little later, when a small pool no longer has what they begin with."""
        draw = self._draw
        salted = [replace(one, salt=draw.choice(self._salts)) for one in clients]
        again = [replace(one, arrives_s=one.arrives_s + draw.choice((0.5, 2.0, 6.0))) for one in draw.sample(salted, 3)]
        for one in draw.sample(salted, draw.randrange(len(salted) + 1)):
            tokens = list(one.prompt.encode())
            self._left.append((tokens[: draw.choice((len(tokens), draw.randrange(len(tokens)), 100))], one.salt))
        return salted + again

    def make(self, seed: int, faults: Faults, mixed: bool, theme: str) -> DiskMesh:
        self.mesh = DiskMesh(seed, faults, mixed, theme, left=self._left, salts=self._salts)
        return self.mesh


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    stage = Stage(seed)
    play = releases.run_seed if seed % 3 == 2 else scenario.run_seed
    counts = play(seed, stage.clients, "disks", stage.make)
    assert stage.mesh is not None
    return counts + stage.mesh.counts
