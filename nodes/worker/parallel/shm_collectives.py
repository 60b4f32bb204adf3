"""Collectives between processes of one host, over tensors in its memory: used by groups on the CPU.

Data goes through one anonymous shared-memory file, in which each rank writes to two slots of its own in turn. For each
piece of an operation a rank writes its slot, sends every other rank one message on the socket between the two, waits
for theirs, and reads all slots in the order of the ranks, so that a sum has the same bits at every rank and in every
run. Two slots are enough: a rank that has the messages for piece n from all knows that all have read piece n - 1.

Sockets, not polled words in shared memory: a waiting rank sleeps, and when a rank dies, in whatever way, all others
notice at once because its sockets end. Messages carry the piece's number and the operation's kind and size, so that
ranks that compute different things notice instead of mixing them. Rank 0 listens on an abstract socket named by the
unique id, so no file is left behind in any directory; peers must be of the same user.
"""

import itertools
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack
from typing import Final, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.device import CPU
from nodes.worker.errors import CollectiveFailed, GroupNotFormed
from nodes.worker.parallel.collectives import Collectives, CollectivesMaker

SLOT_BYTES: Final = 1 << 20
"""Larger operations are done in pieces of this many bytes."""

_NAME_BYTES: Final = 16
"""128 bits drawn at random: an abstract socket's name that is never used twice, nor guessed."""
_HELLO: Final = struct.Struct("<4sII")
_MAGIC: Final = b"kvtp"
_PIECE: Final = struct.Struct("<QBQ")
"""Number of the piece in the group's life, kind of the operation, bytes of the whole operation."""
_SUM: Final = 1
"""Kinds of operation, as ranks tell each other."""
_GATHER: Final = 2
_PEER_CREDENTIALS: Final = struct.Struct("3i")
_ROUND_ROBIN: Final = 2


class ShmCollectivesMaker(CollectivesMaker):
    """Groups on one host. `form_timeout_s` bounds `connect`, `wait_timeout_s` the waiting for others in one piece.

    The latter must be longer than ranks may be apart, which is most while they load weights; the worker's own deadline
    ends a hung step long before.
    """

    def __init__(self, form_timeout_s: float, wait_timeout_s: float = 600.0) -> None:
        self._form_timeout_s = form_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._listeners: dict[bytes, socket.socket] = {}

    @override
    def unique_id(self) -> bytes:
        """A rank that has it finds rank 0 listening, or learns that rank 0 is gone."""
        unique_id = secrets.token_bytes(_NAME_BYTES)
        # SEQPACKET: messages keep their boundaries, and a peer's end is noticed at once.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(unique_id))
        listener.listen()
        self._listeners[unique_id] = listener
        return unique_id

    @override
    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    @override
    def connect(self, unique_id: bytes, rank: int, size: int, device: str) -> "ShmCollectives":
        if device != CPU:
            raise GroupNotFormed(f"ranks on {device} cannot be connected through host memory")
        end = time.monotonic() + self._form_timeout_s
        try:
            if rank == 0:
                listener = self._listeners.pop(unique_id, None)
                if listener is None:
                    raise GroupNotFormed("rank 0 was given a unique id that was not made in its process")
                with listener:
                    links = _invite(listener, size, end)
            else:
                links = _join(unique_id, rank, size, end)
        except OSError as error:
            raise GroupNotFormed(
                f"rank {rank} of {size} did not find the others within {self._form_timeout_s:g} s"
                f" ({type(error).__name__}: {error}); see why their workers ended or did not start"
            ) from error
        return ShmCollectives(rank, size, links, self._wait_timeout_s)


class _Links(NamedTuple):
    """What a rank has of its group: the shared memory, and a socket to each other rank."""

    memory: mmap.mmap
    peers: dict[int, socket.socket]


class ShmCollectives(Collectives):
    """One rank of a group over shared memory. Used from one thread, except `abort`."""

    def __init__(self, rank: int, size: int, links: _Links, wait_timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._memory, self._peers = links
        self._wait_timeout_s = wait_timeout_s
        slots = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = slots.view(_ROUND_ROBIN, size, SLOT_BYTES)
        self._num_pieces = 0
        self._failure = ""
        # An abort comes from another thread, and must not shut down closed sockets whose numbers are in use again.
        self._lock = threading.Lock()

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed in float32."""
        flat = torch.empty(x.numel(), dtype=x.dtype)
        source = x.reshape(-1)
        step = SLOT_BYTES // x.element_size()
        for begin in range(0, source.shape[0], step):
            parts = self._exchange(_SUM, source[begin : begin + step], x.nbytes)
            # In float32, in the order of ranks, rounded once: the same bits at every rank, and no error that grows with
            # the ranks.
            total = parts[0].to(torch.float32, copy=True)
            for part in parts[1:]:
                total += part
            flat[begin : begin + step] = total
        return flat.view(x.shape)

    @override
    def all_gather(self, x: Tensor) -> Tensor:
        num_rows, width = x.shape
        gathered = torch.empty(self.size, num_rows * width, dtype=x.dtype)
        source = x.reshape(-1)
        step = SLOT_BYTES // x.element_size()
        for begin in range(0, source.shape[0], step):
            gathered[:, begin : begin + step] = self._exchange(_GATHER, source[begin : begin + step], x.nbytes)
        return gathered.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, self.size * width)

    @override
    def check(self) -> None:
        if self._failure:
            raise CollectiveFailed(self._failure)

    @override
    def abort(self) -> None:
        self._fail("the group was aborted")

    @override
    def close(self) -> None:
        """The other ranks take it for the end of this rank."""
        self._fail("the group was closed")
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _exchange(self, kind: int, piece: Tensor, num_bytes: int) -> Tensor:
        """The pieces of all ranks, `[size, len(piece)]`, valid until the next piece but one."""
        self.check()
        number = self._num_pieces
        self._num_pieces += 1
        slots = self._slots[number % _ROUND_ROBIN].view(piece.dtype)[:, : piece.shape[0]]
        slots[self.rank] = piece
        self._meet(_PIECE.pack(number, kind, num_bytes))
        return slots

    def _meet(self, message: bytes) -> None:
        """Send `message` to all others, wait for the same from each. On failure end the group: CollectiveFailed."""
        try:
            for rank, peer in self._peers.items():
                self._tell(rank, peer, message)
            self._await_all(message, time.monotonic() + self._wait_timeout_s)
        except CollectiveFailed as error:
            self._fail(str(error))
            raise CollectiveFailed(self._failure) from error

    @staticmethod
    def _tell(rank: int, peer: socket.socket, message: bytes) -> None:
        try:
            # The socket is never full: no rank is more than a piece ahead of another.
            peer.send(message)
        except OSError as error:
            raise CollectiveFailed(f"rank {rank} is gone") from error

    def _await_all(self, message: bytes, end: float) -> None:
        waiting = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise CollectiveFailed(
                    f"ranks {sorted(waiting.values())} did not arrive within {self._wait_timeout_s:g} s"
                )
            for fd, _ in poll.poll(left_s * 1000):
                # Only once: a rank that has answered may be a piece ahead before the last one has answered.
                poll.unregister(fd)
                rank = waiting.pop(fd)
                found = _received(self._peers[rank])
                if not found:
                    raise CollectiveFailed(f"rank {rank} is gone")
                if found != message:
                    other, here = _PIECE.unpack(found), _PIECE.unpack(message)
                    raise CollectiveFailed(f"rank {rank} computes something else: {other} there, {here} here")

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failure = self._failure or why
            for peer in self._peers.values():
                try:
                    peer.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # The other end was faster.
                    continue


def _invite(listener: socket.socket, size: int, end: float) -> _Links:
    """Rank 0: wait for all others, then give each the shared memory and a socket to each other rank."""
    with ExitStack() as stack:
        peers: dict[int, socket.socket] = {}
        while len(peers) < size - 1:
            listener.settimeout(_left(end))
            peer = stack.enter_context(listener.accept()[0])
            # Abstract names have no permissions: any process of the host may connect.
            if not _is_ours(peer):
                continue
            peer.settimeout(_left(end))
            rank = _greeted(peer.recv(_HELLO.size), size)
            if rank in peers:
                raise GroupNotFormed(f"two workers claim to be rank {rank}")
            peers[rank] = peer
        # Without a name in any directory there is nothing that a killed group could leave behind.
        fd = os.memfd_create("kvmesh-tp", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, _ROUND_ROBIN * size * SLOT_BYTES)
        ends = {rank: [fd] for rank in peers}
        for one, other in itertools.combinations(sorted(peers), 2):
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, side in zip((one, other), pair, strict=True):
                ends[rank].append(stack.enter_context(side).fileno())
        for rank, peer in peers.items():
            socket.send_fds(peer, [_MAGIC], ends[rank])
        memory = mmap.mmap(fd, 0)
        return _Links(memory, {rank: _kept(peer) for rank, peer in peers.items()})


def _join(unique_id: bytes, rank: int, size: int, end: float) -> _Links:
    """Any other rank: join rank 0, and get the shared memory and the sockets from it."""
    with ExitStack() as stack:
        hub = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        hub.settimeout(_left(end))
        hub.connect(_address(unique_id))
        if not _is_ours(hub):
            raise GroupNotFormed("another user's process listens under the group's unique id")
        hub.send(_HELLO.pack(_MAGIC, rank, size))
        hub.settimeout(_left(end))
        found, fds, _, _ = socket.recv_fds(hub, len(_MAGIC), size, socket.MSG_CMSG_CLOEXEC)
        others = [other for other in range(1, size) if other != rank]
        for fd in fds:
            stack.callback(os.close, fd)
        if found != _MAGIC or len(fds) != 1 + len(others):
            raise GroupNotFormed(
                "rank 0 has ended while it waited for the others, or expected a different set of ranks"
            )
        peers = {0: _kept(hub)}
        for other, fd in zip(others, fds[1:], strict=True):
            peers[other] = socket.socket(fileno=os.dup(fd))
        return _Links(mmap.mmap(fds[0], 0), peers)


def _received(peer: socket.socket) -> bytes:
    """One message; empty if the peer has ended, in whatever way."""
    try:
        return peer.recv(_PIECE.size)
    except ConnectionError:
        return b""


def _address(unique_id: bytes) -> bytes:
    return b"\0kvmesh-tp-" + unique_id.hex().encode()


def _is_ours(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    return uid == os.getuid()


def _greeted(hello: bytes, size: int) -> int:
    """The rank that joins. Raises GroupNotFormed."""
    if len(hello) != _HELLO.size:
        raise GroupNotFormed("a rank ended while it joined")
    magic, rank, its_size = _HELLO.unpack(hello)
    if magic != _MAGIC or its_size != size or not 0 < rank < size:
        raise GroupNotFormed(f"rank {rank} of {its_size} wants to join a group of {size}")
    return rank


def _kept(peer: socket.socket) -> socket.socket:
    """A duplicate of the connection, which stays open when the caller's `ExitStack` closes `peer`."""
    kept = peer.dup()
    kept.settimeout(None)
    return kept


def _left(end: float) -> float:
    """Seconds until `end`. Raises TimeoutError when it has passed."""
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("too late")
    return left_s
