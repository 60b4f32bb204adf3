"""Pages between CUDA pools of one host: the destination's agent copies, on the device, out of the source pool.

Copies go into a stream of their own for each destination device, from `gather_from` at a time as one kernel that copies
them all (`kvstore/pool/cuda/gather.py`), where both ends are on that device. `poll` puts a bounded number into it and
asks the marks behind them whether they have ended, so the agent's loop never waits for a device. What is in a stream
cannot be called back: a transfer that is cancelled or late puts nothing more in, and its completion comes when what it
put in has ended, since until then its pages may still be written.

No event crosses processes. Pages are announced after their worker has seen the step's tokens on the host, so the
source is written; and they are said to be pulled after the mark behind them, so whoever reads them next does so later.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.errors import DeviceError, KVError, PagesElsewhere, TransferError
from kvstore.pool.cuda.gather import MAX_RANGES
from kvstore.pool.cuda.memory import CopyMark, CopyRange, CopyStream
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU, CUDA, cuda_ordinal
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Peer, Transfer, Transport
from kvstore.transfer.mapped.peer import MappedPeer
from kvstore.transfer.plan import Descriptor

# Putting a copy into a stream takes 3 to 5 microseconds [not yet measured here], so a poll takes about a millisecond.
DEFAULT_COPIES_PER_POLL: Final = 256
# From so many copies on one launch is cheaper than as many calls [not yet measured]; and in one launch a copy costs the
# host about an eighth of a call.
DEFAULT_GATHER_FROM: Final = 4
_GATHERED_PER_CALL: Final = 8

# 1,024 polls that find nothing to do take a few milliseconds, ten times what a large transfer takes; who is slower
# than that (a device under load, another device) is looked at once a millisecond.
_EAGER_POLLS: Final = 1024
_PAUSE_S: Final = 0.001


class _Copy:
    """One posted transfer: what is not in the stream yet, and the mark behind what is."""

    __slots__ = ("mark", "parts", "peer", "transfer")

    def __init__(self, transfer: Transfer, peer: MappedPeer) -> None:
        self.transfer = transfer
        self.peer = peer
        self.parts = deque(merge(transfer.parts))
        self.mark: CopyMark | None = None

    def end(self, code: str, message: str) -> None:
        """Put nothing more of this transfer into its stream."""
        self.parts.clear()
        self.transfer.fail(code, message)

    def has_settled(self) -> bool:
        """Whether nothing of it runs on the device. A fault ends everything there, so nothing does after it."""
        try:
            return self.mark is None or self.mark.is_done()
        except DeviceError as fault:
            self.transfer.error = TransferError(fault.code, fault.message)
            return True

    def progress(self) -> str:
        """What has become of it so far."""
        return f"{len(self.parts)} copies were not begun yet, {self.transfer.num_bytes} bytes were"


class CudaIpcTransport(Transport):
    """Between pools on the devices of one host."""

    name = "cuda_ipc"
    kinds = frozenset({CUDA})

    def __init__(
        self,
        host: CudaHost,
        copies_per_poll: int = DEFAULT_COPIES_PER_POLL,
        gather_from: int = DEFAULT_GATHER_FROM,
    ) -> None:
        self._host = host
        self._copies_per_poll = copies_per_poll
        self._gather_from = gather_from
        self._peers: list[MappedPeer] = []
        self._leaving: list[MappedPeer] = []
        self._posted: deque[_Copy] = deque()
        self._streams: dict[int, CopyStream] = {}
        self._num_idle = 0

    @property
    def num_posted(self) -> int:
        """Copies that have not ended."""
        return len(self._posted)

    @property
    def pause_s(self) -> float:
        """Seconds until another look at the device pays."""
        return 0.0 if self._num_idle < _EAGER_POLLS else _PAUSE_S

    def register(self, pool: PagePool) -> None:
        """Raises PagesElsewhere for a pool in host memory, DeviceUnavailable.

        Makes the stream of the pool's device, and compiles its kernel, so that no transfer has to wait for that. Where
        a worker made the pages the first transfer has to: until then this process has no context on the device.
        """
        _require_device(pool)
        # A context takes memory of the device, which this process does not need where a worker made the pages.
        if not pool.info.is_in_worker:
            self._stream_of(cuda_ordinal(pool.info.device))

    def connect(self, handle: PoolHandle) -> MappedPeer:
        """Opens the pages: an error of the device is one of this call."""
        pool = self._host.open(handle.path, writable=False)
        try:
            _require_device(pool)
            peer = MappedPeer(pool, self)
            pool.device_pages  # noqa: B018 - opens them
        except BaseException:
            pool.close()
            raise
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """The handle is closed when no copy reads through it any more."""
        for copy in self._posted:
            if copy.peer is peer:
                copy.end("source_lost", f"the pool of {peer.info.group} was given up")
        # Closed later: copies in the stream read through the handle, and closing it under them is a fault of the
        # device.
        self._leaving += [known for known in self._peers if known is peer]
        self._peers = [known for known in self._peers if known is not peer]
        self._close_unused()

    def post(self, transfer: Transfer) -> None:
        """Raises TransferError `unsupported` for a pool that this transport has not opened, `bad_descriptor`."""
        if not isinstance(transfer.peer, MappedPeer):
            raise TransferError("unsupported", f"{self.name} only reads from pools that it has opened itself")
        transfer.require_inside()
        self._posted.append(_Copy(transfer, transfer.peer))
        self._num_idle = 0

    def poll(self, now: float) -> list[Transfer]:
        """Begins at most `copies_per_poll` copies, dealt out in turns, and waits for none."""
        ended: list[Transfer] = []
        budget = self._copies_per_poll
        for _ in range(len(self._posted)):
            copy = self._posted.popleft()
            # What is in the stream cannot be called back, so a late transfer still waits for its mark below.
            if copy.transfer.error is None and now >= copy.transfer.deadline:
                copy.end("deadline_exceeded", copy.progress())
            if copy.parts and budget > 0:
                budget -= self._advance(copy, budget)
            # Parts are cleared by an end, so this is the way out of failed transfers, too.
            if not copy.parts and copy.has_settled():
                ended.append(copy.transfer)
            else:
                self._posted.append(copy)
        # Whoever came first in this poll comes last in the next.
        self._posted.rotate(-1)
        self._num_idle = 0 if ended or budget < self._copies_per_poll else self._num_idle + 1
        if ended:
            self._close_unused()
        return ended

    def cancel(self, transfer: Transfer) -> None:
        """Copy nothing more of it."""
        for copy in self._posted:
            if copy.transfer is transfer:
                copy.end("cancelled", "the transfer was cancelled")

    def drain(self) -> list[Transfer]:
        """Blocks until the devices have done what is in their streams."""
        ended: list[Transfer] = []
        while self._posted:
            copy = self._posted.popleft()
            copy.end("cancelled", "the transfer was cancelled")
            if copy.mark is not None:
                try:
                    copy.mark.wait()
                except DeviceError as fault:
                    copy.transfer.error = TransferError(fault.code, fault.message)
            ended.append(copy.transfer)
        self._close_unused()
        return ended

    def close(self) -> None:
        """Drain, and unmap every pool."""
        self.drain()
        for peer in self._peers:
            _close_pool(peer.pool)
        self._peers.clear()
        self._streams.clear()

    def _advance(self, copy: _Copy, budget: int) -> int:
        """Put up to `budget` copies of one transfer into its stream, more by a kernel; returns what it took of that."""
        try:
            # Asked for each time: a pool that was closed says so, and its address must not be used.
            target, source = copy.transfer.pool.device_pages, copy.peer.pool.device_pages
            # A kernel reads another device's memory only where peer access was enabled, and ends the process if not.
            is_near = target.device == source.device
            stream = self._stream_of(target.device)
            gathers = is_near and 0 < self._gather_from <= len(copy.parts)
            if gathers and not stream.can_gather():
                # As many single calls as one kernel copies pages would hold up the loop just when the device is busy.
                return 0
            limit = min(MAX_RANGES, budget * _GATHERED_PER_CALL) if gathers else budget
            parts = [copy.parts.popleft() for _ in range(min(limit, len(copy.parts)))]
            ranges = [
                CopyRange(target.pointer + part.local_offset, source.pointer + part.remote_offset, part.num_bytes)
                for part in parts
            ]
            copy.mark = stream.gather(ranges) if gathers else stream.copy(ranges)
        except KVError as error:
            copy.end(error.code, f"{error.message}; {copy.progress()}")
            return 0
        copy.transfer.num_bytes += sum(part.num_bytes for part in parts)
        return -(-len(parts) // _GATHERED_PER_CALL) if gathers else len(parts)

    def _stream_of(self, device: int) -> CopyStream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._host.memory.stream(device, gathers=self._gather_from > 0)
        return stream

    def _close_unused(self) -> None:
        # By identity, not by equality: two mappings of one pool are two handles.
        used = [copy.peer for copy in self._posted]
        for peer in self._leaving:
            if not any(one is peer for one in used):
                _close_pool(peer.pool)
        self._leaving = [peer for peer in self._leaving if any(one is peer for one in used)]


def merge(descriptors: Sequence[Descriptor]) -> list[Descriptor]:
    """The same bytes in the same order, neighbours at both ends as one: each copy costs its start."""
    merged: list[Descriptor] = []
    for part in descriptors:
        if merged:
            last = merged[-1]
            end = last.local_offset + last.num_bytes, last.remote_offset + last.num_bytes
            if end == (part.local_offset, part.remote_offset):
                merged[-1] = last._replace(num_bytes=last.num_bytes + part.num_bytes)
                continue
        merged.append(part)
    return merged


def _require_device(pool: PagePool) -> None:
    if pool.info.device == CPU:
        raise PagesElsewhere(f"the pages of {pool.path} lie in host memory: between them `shm` copies, not `cuda_ipc`")


def _close_pool(pool: PagePool) -> None:
    # A device that has failed cannot close a handle either; what this process had there goes with it.
    with contextlib.suppress(DeviceError):
        pool.close()
