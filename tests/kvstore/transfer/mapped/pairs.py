"""Two pools and a transport that copies from one to the other: in host memory, or on devices of two processes."""

import random

from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.transfer.base import Transfer
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.plan import Descriptor
from tests.kvstore.fake_devices import FakeCards, Process
from tests.kvstore.transfer.transfers import DEVICE, NEVER, SIZE, make_pool


class Pair:
    """A source pool with random content, and a destination with a transport that has reached it."""

    source: PagePool
    destination: PagePool
    from_bytes: memoryview
    to_bytes: memoryview
    transport: ShmTransport | CudaIpcTransport

    def connect(self) -> None:
        self.from_bytes[:] = random.Random(1).randbytes(len(self.from_bytes))
        self.transport.register(self.destination)
        self.peer = self.transport.connect(handle_of(self.source))

    def post(self, parts: list[Descriptor], deadline: float = NEVER) -> Transfer:
        transfer = Transfer(self.destination, self.peer, parts, deadline)
        self.transport.post(transfer)
        return transfer

    def codes(self, now: float = 0.0) -> dict[Transfer, str]:
        """What ends in a poll: the error of each, empty if it has none."""
        return {ended: ended.error.code if ended.error else "" for ended in self.transport.poll(now)}

    def has_copied(self, page: int, target: int) -> bool:
        return self.to_bytes[target * SIZE :][:SIZE] == self.from_bytes[page * SIZE :][:SIZE]


class ShmPair(Pair):
    def __init__(self, tables: MemoryHost, quantum_bytes: int = 4 << 20) -> None:
        self.host = tables
        self.source, self.destination = make_pool(tables, "p"), make_pool(tables, "d")
        self.from_bytes, self.to_bytes = self.source.pages_view, self.destination.pages_view
        self.transport = ShmTransport(tables, quantum_bytes)
        self.connect()


class DevicePair(Pair):
    """`copies_per_look`: see `FakeCards`."""

    def __init__(
        self,
        tables: MemoryHost,
        *,
        copies_per_poll: int = 256,
        copies_per_look: int | None = None,
        gather_from: int = 0,
        is_same: bool = False,
    ) -> None:
        self.cards = FakeCards(num_devices=2)
        self.cards.copies_per_look = copies_per_look
        self.here = Process(tables, self.cards)
        self.there = self.here if is_same else Process(tables, self.cards)
        self.host = self.here.host
        self.source, self.destination = make_pool(self.there.host, "p", DEVICE), make_pool(self.host, "d", DEVICE)
        self.from_bytes, self.to_bytes = self.there.bytes_of(self.source), self.here.bytes_of(self.destination)
        self.transport = CudaIpcTransport(self.host, copies_per_poll, gather_from)
        self.connect()
