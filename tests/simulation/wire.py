"""Connections between the kv_agents of simulated hosts, which carry the bytes of pages, on virtual time.

A connection runs into the same cuts as the messages of its two agents, stands still while one of them does, and breaks
when one of them dies. An end that gives a transfer up is written to for a while longer, as by a thread in the middle of
a read: until its `Stopped`.
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from kvstore.pool.device import CPU
from kvstore.transfer.paired.link import Broken, LinkMaker, Memory, Moved, News, PairLink, Ready, Stopped
from mesh.simulation.network import SimulatedNetwork
from mesh.testing.processes import RUNNING_PROCESS, ProcessState, SimulatedProcess

LATENCY_S = 0.0005
AGAIN_S = 0.1
"""The time between two tries to get through a cut, or to a process that stands still."""


class _Move(NamedTuple):
    number: int
    memory: memoryview
    parts: list[tuple[int, int]]


class Wire:
    """All connections of one mesh. A quantum of `quantum_bytes` takes `copy_s`; `num_moved` transfers have ended well.

    An end that is given up is written to for up to `most_late` quanta more.
    """

    def __init__(self, network: SimulatedNetwork, copy_s: float, most_late: int, quantum_bytes: int) -> None:
        self.network = network
        self.copy_s = copy_s
        self.most_late = most_late
        self.quantum_bytes = quantum_bytes
        self.num_made = 0
        self.num_moved = 0
        self.num_late = 0
        self.dice = random.Random(f"wire/{network.seed}")
        self._ends: dict[bytes, dict[int, WireEnd]] = {}
        # What is on its way belongs to neither of the two.
        self._context = contextvars.copy_context()

    def later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Call it later, outside of any process."""
        asyncio.get_running_loop().call_later(delay_s, callback, *arguments, context=self._context)

    def add(self, name: bytes, rank: int, end: "WireEnd") -> None:
        """One half of a connection."""
        ends = self._ends.setdefault(name, {})
        assert rank not in ends, "a connection has two ends"
        ends[rank] = end

    def meet(self, name: bytes) -> None:
        """Connect the two, if both are there and can speak to each other."""
        ends = self._ends[name]
        if (
            len(ends) < 2
            or not all(end.has_begun for end in ends.values())
            or any(end.is_ready for end in ends.values())
        ):
            return
        if self._is_over(ends):
            return
        if not self._can_speak(ends):
            self.later(AGAIN_S, self.meet, name)
            return
        for end in ends.values():
            end.is_ready = True
            end.hear(Ready())

    def carry(self, name: bytes) -> None:
        """Begin a transfer that both ends have queued."""
        ends = self._ends[name]
        if all(end.waiting for end in ends.values()) and len(ends) == 2:
            receiving, sending = ends[0].waiting.popleft(), ends[1].waiting.popleft()
            assert receiving.number == sending.number, "the two ends have queued their transfers in different orders"
            assert [size for _, size in receiving.parts] == [size for _, size in sending.parts]
            self._step(name, receiving, sending, self._quanta(receiving, sending))

    def _quanta(self, receiving: _Move, sending: _Move) -> Iterator[tuple[slice, slice]]:
        for (target, size), (source, _) in zip(receiving.parts, sending.parts, strict=True):
            for at in range(0, size, self.quantum_bytes):
                num = min(self.quantum_bytes, size - at)
                yield slice(target + at, target + at + num), slice(source + at, source + at + num)

    def _step(self, name: bytes, receiving: _Move, sending: _Move, quanta: Iterator[tuple[slice, slice]]) -> None:
        ends = self._ends[name]
        if self._is_over(ends):
            return
        if not self._can_speak(ends):
            self.later(AGAIN_S, self._step, name, receiving, sending, quanta)
            return
        pair = next(quanta, None)
        if pair is None:
            self.num_moved += 1
            for end in ends.values():
                end.hear(Moved(receiving.number))
            return
        self.num_late += ends[0].is_aborted
        receiving.memory[pair[0]] = sending.memory[pair[1]]
        self.later(self.copy_s, self._step, name, receiving, sending, quanta)

    def _can_speak(self, ends: "dict[int, WireEnd]") -> bool:
        is_running = all(end.process.state is ProcessState.RUNNING for end in ends.values())
        return is_running and not self._is_cut(ends)

    def _is_cut(self, ends: "dict[int, WireEnd]") -> bool:
        one, other = ends[0].process.name, ends[1].process.name
        # In either direction: without acknowledgements nothing goes on.
        return self.network.is_cut(one, other) or self.network.is_cut(other, one)

    def _is_over(self, ends: "dict[int, WireEnd]") -> bool:
        """Whether one of the two is gone; the other hears of it as soon as it can."""
        is_over = any(end.is_gone for end in ends.values())
        if is_over and len(ends) == 2 and not self._is_cut(ends):
            for end in ends.values():
                if not end.is_gone and not end.is_broken:
                    end.is_broken = True
                    end.hear(Broken("the connection was closed by the other end"))
        return is_over

    def watch(self, name: bytes) -> None:
        """Tell one end of the other's end, now or when they can speak again."""
        ends = self._ends[name]
        self._is_over(ends)
        if not all(end.is_gone or end.is_broken for end in ends.values()):
            self.later(AGAIN_S, self.watch, name)


class WireEnd(PairLink):
    """One half, of the process that made it. `is_aborted`: given up, and perhaps still written to."""

    def __init__(self, wire: Wire, name: bytes, process: SimulatedProcess, wake: Callable[[], None]) -> None:
        self.process = process
        self.waiting: deque[_Move] = deque()
        self.has_begun = self.is_ready = self.is_aborted = self.is_stopped = self.is_broken = False
        self._wire = wire
        self._name = name
        self._wake = wake
        self._news: deque[News] = deque()

    @property
    def is_gone(self) -> bool:
        """Whether nothing reads or writes here any more."""
        return self.is_stopped or self.process.state in (ProcessState.DEAD, ProcessState.ENDED)

    def hear(self, news: News) -> None:
        """Something has happened."""
        if not self.is_stopped:
            self._news.append(news)
            self.process.enter(self._wake)

    @override
    def begin(self) -> None:
        self.has_begun = True
        self._wire.later(LATENCY_S, self._wire.meet, self._name)
        self._wire.later(AGAIN_S, self._wire.watch, self._name)

    @override
    def move(self, number: int, memory: Memory, parts: Sequence[tuple[int, int]]) -> None:
        assert self.is_ready, "nothing is moved before the two ends have met"
        assert isinstance(memory, memoryview)
        self.waiting.append(_Move(number, memory, list(parts)))
        self._wire.later(LATENCY_S, self._wire.carry, self._name)

    @override
    def abort(self) -> None:
        self.is_aborted = True
        self._wire.later(self._wire.dice.random() * self._wire.most_late * self._wire.copy_s, self._end)

    def _end(self) -> None:
        self.hear(Stopped())
        self.stop()

    @override
    def news(self) -> list[News]:
        found = list(self._news)
        self._news.clear()
        return found

    @override
    def stop(self) -> None:
        self.is_aborted = self.is_stopped = True
        self.waiting.clear()


class WireLinks(LinkMaker):
    """The halves of one agent."""

    name: ClassVar[str] = "tcp"
    kinds: ClassVar[frozenset[str]] = frozenset({CPU})
    eager_polls: ClassVar[int] = 0

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._wake: Callable[[], None] = lambda: None

    @override
    def open(self, wake: Callable[[], None]) -> str:
        self._wake = wake
        return ""

    @override
    def unique_id(self) -> bytes:
        self._wire.num_made += 1
        return b"%d" % self._wire.num_made

    @override
    def link(self, device: str, unique_id: bytes, rank: int) -> WireEnd:
        process = RUNNING_PROCESS.get()
        assert process is not None
        end = WireEnd(self._wire, unique_id, process, self._wake)
        self._wire.add(unique_id, rank, end)
        return end

    @override
    def close(self) -> None:
        return
