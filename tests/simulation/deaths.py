"""Where a simulated actor can die halfway: in its messages, and in its stores to a page table."""

import random
from collections.abc import Sequence
from typing import Any

from kvstore.cache.page_table import PageTable
from kvstore.pool.page_pool import HeapHost, PagePool
from mesh.address import Address, Endpoint
from mesh.simulation.network import SimulatedNetwork, SimulatedTransport
from mesh.testing.processes import RUNNING_PROCESS, SimulatedProcess
from mesh.transport.base import Buffer, Channel, Link, Listener

MARK = slice(6, 8)
BODY = 8


class MortalTransport:
    """A transport whose actor is a process: what arrives is handled in that process, which may die at any message."""

    def __init__(self, network: SimulatedNetwork, address: Address, process: SimulatedProcess) -> None:
        self._inner: SimulatedTransport = network.transport(address)
        self._process = process
        self._dice = random.Random(f"deaths/{network.seed}/{address}")

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        return await self._inner.start(address, _AsProcess(self._process, listener))

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        return self._inner.dial(peer, endpoint)

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        if self._process.is_last_point():
            if self._dice.random() < 0.5:
                self._inner.send(link, channel, parts)
            self._process.die()
        return self._inner.send(link, channel, parts)

    def close_link(self, link: Link) -> None:
        self._inner.close_link(link)

    async def stop(self) -> None:
        await self._inner.stop()


class _AsProcess:
    """A listener that is called in its process."""

    def __init__(self, process: SimulatedProcess, listener: Listener) -> None:
        self._process = process
        self._listener = listener

    def on_frames(self, link: Link, channel: Channel, frames: Any) -> None:
        self._process.enter(self._listener.on_frames, link, channel, frames)

    def on_link_down(self, link: Link, reason: str) -> None:
        self._process.enter(self._listener.on_link_down, link, reason)

    def on_some_link_down(self) -> None:
        self._process.enter(self._listener.on_some_link_down)


class MortalHost(HeapHost):
    """Pools whose page tables a scheduler may die in the middle of writing."""

    def __init__(self, seed: int | str) -> None:
        super().__init__()
        self._dice = random.Random(f"tables/{seed}")
        self.num_torn = 0

    def open(self, path: str, *, writable: bool, own: bool = False) -> PagePool:
        pool = super().open(path, writable=writable, own=own)
        pool.table = lambda: _MortalTable(self, pool)  # type: ignore[method-assign]
        return pool

    def tear(self, slot: memoryview, before: bytes) -> None:
        """Leave a slot as a store that was cut short would: its steps are made in order, the long one byte by byte."""
        after = bytes(slot)
        step = self._dice.randrange(4)
        self.num_torn += 1
        if step == 0:
            slot[:] = before
        elif step < 3:
            slot[MARK] = b"\xa5\xc3"
            if step == 1:
                end = self._dice.randrange(BODY, len(after))
                slot[end:] = before[end:]
                slot[: MARK.start] = before[: MARK.start]
        else:
            slot[:] = after


class _MortalTable(PageTable):
    def __init__(self, host: MortalHost, pool: PagePool) -> None:
        super().__init__(pool.table_view, pool.num_pages, pool.layout.page_size)
        self._host = host

    def _put(self, page: int, checked: bytes) -> None:
        process = RUNNING_PROCESS.get()
        if process is None or not process.is_last_point():
            super()._put(page, checked)
            return
        size = self._slot_bytes
        slots = [self._view[at * size : (at + 1) * size] for at in (2 * page, 2 * page + 1)]
        before = [bytes(slot) for slot in slots]
        super()._put(page, checked)
        changed = next(index for index, slot in enumerate(slots) if bytes(slot) != before[index])
        self._host.tear(slots[changed], before[changed])
        process.die()
