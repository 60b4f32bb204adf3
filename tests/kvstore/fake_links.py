"""Pairs of two ranks over fake devices and pools, for tests only. Sends and receives meet by their order alone."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvstore.errors import DeviceUnavailable
from kvstore.pool.device import CPU, CUDA, DevicePages
from kvstore.transfer.paired.link import Broken, Memory, Moved, News, Ready, Stopped
from tests.kvstore.fake_devices import FakeDeviceMemory


class FakeWire:
    """What is between all ends. `is_slow`: nothing moves until `step`; `is_deaf`: no communicator comes about."""

    def __init__(self) -> None:
        self.ends: dict[bytes, dict[int, FakeLink]] = {}
        self.num_ids = 0
        self.is_slow = False
        self.is_deaf = False
        self.is_stuck = False

    @property
    def links(self) -> "list[FakeLink]":
        return [link for ends in self.ends.values() for link in ends.values()]

    def step(self) -> bool:
        """Carry out one group, if any pair has both of its halves at hand."""
        for ends in self.ends.values():
            if len(ends) == 2 and all(link.waiting and link.is_ready and not link.is_aborted for link in ends.values()):
                self._carry(ends[0], ends[1])
                return True
        return False

    def run(self) -> None:
        while self.step():
            pass

    @staticmethod
    def _carry(receiver: "FakeLink", sender: "FakeLink") -> None:
        number, targets = receiver.waiting.popleft()
        same, sources = sender.waiting.popleft()
        assert number == same, "the two ends have queued their transfers in different orders"
        assert [size for _, size in targets] == [size for _, size in sources]
        for (target, size), (source, _) in zip(targets, sources, strict=True):
            receiver.view(target, size)[:] = sender.view(source, size)
        receiver.found.append(Moved(number))
        sender.found.append(Moved(number))


class FakeLinks:
    """See `LinkMaker`: those of one process."""

    name = "nccl"
    kinds = frozenset({CPU, CUDA})
    eager_polls = 1024

    def __init__(self, wire: FakeWire, memory: FakeDeviceMemory, name: str = "nccl") -> None:
        self.name = name  # pyright: ignore[reportIncompatibleVariableOverride] - a fake is of either engine
        self.kinds = frozenset({CUDA} if name == "nccl" else {CPU, CUDA})
        self.wire = wire
        self.memory = memory
        self.is_missing = False

    def open(self, wake: Callable[[], None]) -> str:
        return ""

    @property
    def refused(self) -> Mapping[str, int]:
        return {}

    def unique_id(self) -> bytes:
        if self.is_missing:
            raise DeviceUnavailable("CuPy finds no NCCL")
        self.wire.num_ids += 1
        return b"%d" % self.wire.num_ids + bytes(128 - len(b"%d" % self.wire.num_ids))

    def link(self, device: str, unique_id: bytes, rank: int) -> "FakeLink":
        if self.is_missing:
            raise DeviceUnavailable("CuPy finds no NCCL")
        link = FakeLink(self.wire, self.memory, unique_id)
        ends = self.wire.ends.setdefault(unique_id, {})
        assert rank not in ends
        ends[rank] = link
        return link

    def close(self) -> None:
        pass


class FakeLink:
    def __init__(self, wire: FakeWire, memory: FakeDeviceMemory, unique_id: bytes) -> None:
        self.wire = wire
        self.memory = memory
        self.unique_id = unique_id
        self.waiting: deque[tuple[int, list[tuple[int, int]]]] = deque()
        self.pages: Memory | None = None
        self.found: deque[News] = deque()
        self.has_begun = False
        self.is_ready = False
        self.is_aborted = False

    def begin(self) -> None:
        assert not self.has_begun
        self.has_begun = True
        ends = self.wire.ends[self.unique_id]
        if not self.wire.is_deaf and len(ends) == 2 and all(link.has_begun for link in ends.values()):
            for link in ends.values():
                link.is_ready = True
                link.found.append(Ready())

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of the pool that the last `move` named."""
        if isinstance(self.pages, DevicePages):
            allocation, at = self.memory.find(self.pages.pointer + offset, size)
            return memoryview(allocation.data)[at : at + size]
        assert self.pages is not None
        return self.pages[offset : offset + size]

    def move(self, number: int, memory: Memory, parts: Sequence[tuple[int, int]]) -> None:
        assert self.is_ready, "nothing is moved before the communicator is there"
        assert not self.is_aborted
        assert not self.waiting, "one transfer at a time"
        self.pages = memory
        self.waiting.append((number, list(parts)))

    def abort(self) -> None:
        self.is_aborted = True
        if not self.wire.is_stuck:
            self.stop()

    def news(self) -> list[News]:
        if not self.wire.is_slow:
            self.wire.run()
        found = list(self.found)
        self.found.clear()
        return found

    def stop(self) -> None:
        self.is_aborted = True
        self.waiting.clear()
        self.found.append(Stopped())
        for other in self.wire.ends[self.unique_id].values():
            if other is not self and not other.is_aborted:
                other.found.append(Broken("remote process exited"))
