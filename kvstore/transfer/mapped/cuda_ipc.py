"""Moves pages between CUDA pools of one host: the destination's agent copies, on the device, out of the source pool.

Each destination device has a stream for copies. Where both ends are on that device, `gather_from` copies or more are
made by one kernel (`kvstore/pool/cuda/gather.py`). `poll` puts a bounded number of copies into the stream and checks
the marks behind them, so the agent's loop never waits for a device. What is in a stream cannot be called back: a
transfer that is cancelled or late puts nothing more in, and it ends when what it has put in has ended, since until then
its pages may still be written.

No CUDA event crosses processes. Pages are announced after their worker has seen the step's tokens on the host, so the
source is written; and they are reported as pulled after the mark behind them, so their next reader comes later.
"""

import contextlib
from typing import Final

from kvstore.errors import DeviceError, KVError, TransferError
from kvstore.pool.cuda.gather import MAX_RANGES
from kvstore.pool.cuda.memory import CopyMark, CopyRange, CopyStream
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CUDA, cuda_ordinal
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Transfer
from kvstore.transfer.mapped.peer import MappedPeer
from kvstore.transfer.mapped.transport import MappedCopy, MappedTransport
from kvstore.transfer.plan import Descriptor

# Putting a copy into a stream takes 4.7 microseconds (4,096 copies of 16 KiB on an H100's host, a Python call each), so
# a poll takes about a millisecond.
DEFAULT_COPIES_PER_POLL: Final = 256
# A launch costs the host some 40 microseconds, 25 of them for its table, and each copy in it an eighth of a call: eight
# calls cost as much (an H200's host).
DEFAULT_GATHER_FROM: Final = 8
_GATHERED_PER_CALL: Final = 8
# Of a long transfer so many copies are launched first, so that the device works while the host lays out the rest: 256
# copies took an H200's host some 150 us, and the device 254. With fewer the device would wait for the second launch.
_FIRST_GATHERED: Final = 96

# 1,024 polls that find nothing to do take a few milliseconds, ten times what a large transfer takes; a transfer slower
# than that (a device under load, another device) is polled once a millisecond.
_EAGER_POLLS: Final = 1024
# A transfer that takes this path lasts tens of milliseconds, of which one millisecond is little.
_PAUSE_S: Final = 0.001


class _Copy(MappedCopy):
    """A transfer: parts that are not in the stream yet, and the mark behind those that are."""

    __slots__ = ("mark", "peer")

    def __init__(self, transfer: Transfer, peer: MappedPeer) -> None:
        super().__init__(transfer)
        self.peer = peer
        self.mark: CopyMark | None = None

    def has_settled(self) -> bool:
        """Whether none of its copies runs on the device. A fault ends everything there, so none runs after it."""
        try:
            return self.mark is None or self.mark.is_done()
        except DeviceError as fault:
            self.transfer.error = TransferError(fault.code, fault.message)
            return True

    def take(self, most: int) -> list[Descriptor]:
        """The next parts, so many at most, which are then no longer among `parts`."""
        return [self.parts.popleft() for _ in range(min(most, len(self.parts)))]

    def progress(self) -> str:
        return f"{len(self.parts)} copies had not begun; those begun have {self.transfer.num_bytes} bytes"


class CudaIpcTransport(MappedTransport[_Copy]):
    """Between pools on the devices of one host."""

    name = "cuda_ipc"
    kinds = frozenset({CUDA})

    def __init__(
        self,
        host: CudaHost,
        copies_per_poll: int = DEFAULT_COPIES_PER_POLL,
        gather_from: int = DEFAULT_GATHER_FROM,
    ) -> None:
        super().__init__(host)
        self._devices = host
        self._copies_per_poll = copies_per_poll
        self._gather_from = gather_from
        self._leaving: list[MappedPeer] = []
        self._streams: dict[int, CopyStream] = {}
        self._num_idle = 0

    @property
    def pause_s(self) -> float:
        return 0.0 if self._num_idle < _EAGER_POLLS else _PAUSE_S

    def register(self, pool: PagePool) -> None:
        """Compiles the kernel, so that no transfer waits for it. Raises PagesElsewhere, DeviceUnavailable."""
        super().register(pool)
        self._stream_of(cuda_ordinal(pool.info.device))

    def connect(self, handle: PoolHandle) -> MappedPeer:
        """Opens the pages too, so that device errors are raised here."""
        peer = super().connect(handle)
        try:
            peer.pool.device_pages  # noqa: B018 - opens them
        except BaseException:
            # Whatever it was: a mapping without its pages must not stay among the peers.
            self.disconnect(peer)
            raise
        return peer

    def post(self, transfer: Transfer) -> None:
        peer = self._require_own(transfer)
        self._posted.append(_Copy(transfer, peer))
        self._num_idle = 0

    def poll(self, now: float) -> list[Transfer]:
        """Begins at most `copies_per_poll` copies, of all transfers in turn, and waits for none."""
        ended: list[Transfer] = []
        budget = self._copies_per_poll
        for _ in range(len(self._posted)):
            copy = self._posted.popleft()
            transfer = copy.transfer
            if now >= transfer.deadline:
                transfer.fail("deadline_exceeded", copy.progress())
            if transfer.error is None and copy.parts and budget > 0:
                budget -= self._advance(copy, budget)
            # What is in the stream cannot be called back, so a failed transfer waits for its mark, too.
            if (transfer.error is not None or not copy.parts) and copy.has_settled():
                ended.append(transfer)
            else:
                self._posted.append(copy)
        # The transfer that came first in this poll comes last in the next.
        self._posted.rotate(-1)
        self._num_idle = 0 if ended or budget < self._copies_per_poll else self._num_idle + 1
        if ended:
            self._close_unused()
        return ended

    def drain(self) -> list[Transfer]:
        """Blocks until the devices have finished what is in their streams."""
        for copy in self._posted:
            if copy.mark is not None:
                try:
                    copy.mark.wait()
                except DeviceError as fault:
                    copy.transfer.error = TransferError(fault.code, fault.message)
        ended = super().drain()
        self._close_unused()
        return ended

    def close(self) -> None:
        super().close()
        self._streams.clear()

    def _advance(self, copy: _Copy, budget: int) -> int:
        """Put up to `budget` copies of one transfer into its stream, more by a kernel; returns the budget it used."""
        try:
            # Read each time: a pool that was closed raises, and its address must not be used.
            target, source = copy.transfer.pool.device_pages, copy.peer.pool.device_pages
            # A kernel can read another device's memory only if peer access was enabled; if not, it ends the process.
            is_near = target.device == source.device
            stream = self._stream_of(target.device)
            gathers = is_near and 0 < self._gather_from <= len(copy.parts)
            if gathers and not stream.can_gather():
                # Single calls instead, as many as a kernel makes copies, would hold up the loop when the device is
                # busy.
                return 0
            if not gathers:
                parts = copy.take(budget)
                copy.mark = stream.copy([_range_of(part, target.pointer, source.pointer) for part in parts])
                copy.transfer.num_bytes += sum(part.num_bytes for part in parts)
                return len(parts)
            limit, num_taken = min(MAX_RANGES, budget * _GATHERED_PER_CALL), 0
            is_long = copy.mark is None and 2 * len(copy.parts) >= 3 * _FIRST_GATHERED
            for most in (_FIRST_GATHERED, limit) if is_long else (limit,):
                # The first launch has taken a table; the rest comes with the next poll if there is none left.
                if num_taken and not stream.can_gather():
                    break
                parts = copy.take(min(most, limit - num_taken))
                copy.mark = stream.gather(parts, target.pointer, source.pointer)
                copy.transfer.num_bytes += sum(part.num_bytes for part in parts)
                num_taken += len(parts)
        except KVError as error:
            copy.transfer.fail(error.code, f"{error.message}; {copy.progress()}")
            return 0
        return -(-num_taken // _GATHERED_PER_CALL)

    def _stream_of(self, device: int) -> CopyStream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._devices.memory.stream(device, gathers=self._gather_from > 0)
        return stream

    def _give_up(self, peer: MappedPeer) -> None:
        # Closed later: copies in the stream read through the handle, and closing it under them is a device fault.
        self._leaving.append(peer)
        self._close_unused()

    def _close_unused(self) -> None:
        used = {copy.peer for copy in self._posted}
        for peer in self._leaving:
            if peer not in used:
                # A failed device cannot close a handle either; what this process has there goes with the process.
                with contextlib.suppress(DeviceError):
                    peer.pool.close()
        self._leaving = [peer for peer in self._leaving if peer in used]


def _range_of(part: Descriptor, target: int, source: int) -> CopyRange:
    return CopyRange(target + part.local_offset, source + part.remote_offset, part.num_bytes)
