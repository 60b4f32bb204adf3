"""The last things that one actor did, in memory that outlives it: a file that it maps and its supervisor reads.

    header   64 bytes: magic, version, sizes of the two rings, epoch, the actor's id
    notes    16,384 records of 32 bytes, about requests
    steps     8,192 records, one for each step, so that they do not push out what is known of requests

    record   number (u32) | kind (u16) | unused (u16) | at, seconds (f64) | key (u32) | a (u32) | b (u32) | number (u32)

A record is written from its first byte to its last, and its number stands at both ends: one whose numbers differ, or do
not fit its place, was being written when the actor was killed. Nothing is flushed: the kernel has what a process wrote
into a mapping, whatever becomes of it. The clock is the loop's, which all processes of a host share.
"""

import contextlib
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

from mesh.address import Address

NOTES: Final = 16_384
"""Of some 2,000 requests: a minute at 30 requests a second."""
STEPS: Final = 8_192
"""Two to three minutes of the steps of a small model, half an hour of a large one's."""
UNMAPPED: Final = 64
"""Of an actor without a run directory, as in a simulation of hundreds: only its tests look at them."""
KEPT_INCARNATIONS: Final = 3
"""The present one, and two that died: a crash that repeats is seen twice."""
MAX_FILES: Final = 80
"""Of 0.8 MB each: 64 MB on a host, however many actors it has."""
TRACE: Final = "trace"
"""The folder in the run directory."""

_RECORD: Final = struct.Struct("<IHHdIIII")
_WORDS: Final = _RECORD.size // 4
_HEADER: Final = struct.Struct("<8sHIIQ38s")
_MAGIC: Final = b"kvtrace1"
MAX_NUMBER: Final = 0xFFFF_FFFF
"""The largest number that a note can have."""


class Note(NamedTuple):
    """One record. `at` is on the clock of the actor's host; what `kind`, `a` and `b` mean is the roles' business."""

    at: float
    kind: int
    key: int
    a: int
    b: int


class ActorTrace(NamedTuple):
    """What was read of one incarnation, in order of time. `num_lost`: notes that later ones were written over."""

    actor_id: str
    epoch: int
    notes: list[Note]
    steps: list[Note]
    num_lost: int = 0


def key_of(name: str) -> int:
    """A name as a note has it. Among 2,000 requests two have the same key in one of 2,000 rings."""
    return zlib.crc32(name.encode())


class TraceRing:
    """Written by one actor, on its loop's thread. `open_memory` is called for the first record, since not all have one.

    It returns None where there is nothing to be mapped.
    """

    def __init__(self, now: Callable[[], float], open_memory: Callable[[], mmap.mmap | None] = lambda: None) -> None:
        self._now = now
        self._open_memory = open_memory
        self._memory: mmap.mmap | bytearray | None = None
        self._num_notes = self._num_steps = self._first_step = 0
        self._note = self._step = 0

    def note(self, kind: int, name: str, a: int = 0, b: int = 0) -> None:
        """Something happened to what goes by `name`; `a` and `b` are cut to 32 bits."""
        memory = self._memory or self._begin()
        number = self._note = (self._note + 1) & MAX_NUMBER
        offset = _HEADER.size + number % self._num_notes * _RECORD.size
        key = zlib.crc32(name.encode())
        _RECORD.pack_into(memory, offset, number, kind, 0, self._now(), key, a & MAX_NUMBER, b & MAX_NUMBER, number)

    def step(self, kind: int, number_of_step: int, a: int, b: int) -> None:
        """A step ended."""
        memory = self._memory or self._begin()
        number = self._step = (self._step + 1) & MAX_NUMBER
        offset = self._first_step + number % self._num_steps * _RECORD.size
        key = number_of_step & MAX_NUMBER
        _RECORD.pack_into(memory, offset, number, kind, 0, self._now(), key, a & MAX_NUMBER, b & MAX_NUMBER, number)

    def _begin(self) -> mmap.mmap | bytearray:
        memory = self._open_memory()
        self._num_notes, self._num_steps = (UNMAPPED, UNMAPPED) if memory is None else (NOTES, STEPS)
        self._first_step = _HEADER.size + self._num_notes * _RECORD.size
        self._memory = bytearray(_size(UNMAPPED, UNMAPPED)) if memory is None else memory
        if memory is None:
            # So that tests read it as they would read a file.
            _HEADER.pack_into(self._memory, 0, _MAGIC, 1, UNMAPPED, UNMAPPED, 0, b"")
        return self._memory

    @property
    def content(self) -> bytes:
        """As `read_trace` reads it."""
        return bytes(self._memory or self._begin())


def _size(num_notes: int, num_steps: int) -> int:
    return _HEADER.size + (num_notes + num_steps) * _RECORD.size


def map_ring(folder: Path, address: Address, now: Callable[[], float]) -> TraceRing:
    """The ring of an incarnation, in a file of its own; without one if there is no room for it.

    The files of its earlier incarnations but the last two are removed.
    """
    return TraceRing(now, lambda: _map(folder, address))


def _map(folder: Path, address: Address) -> mmap.mmap | None:
    size = _size(NOTES, STEPS)
    path = folder / f"{address.actor_id}.{address.epoch}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _make_room(folder, address.actor_id)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Its blocks are taken now: writing into a mapping for which the disk has no room left is a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
    except OSError:
        # Nobody can look into this actor then; that it serves matters more.
        return None
    _HEADER.pack_into(memory, 0, _MAGIC, 1, NOTES, STEPS, address.epoch, address.actor_id.encode()[-38:])
    return memory


def _make_room(folder: Path, actor_id: str) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    # By what the name begins with: ids may have dots, and epochs have none.
    own = [path for path in files if path.name.rpartition(".")[0] == actor_id]
    for path in {*own[: len(own) - KEPT_INCARNATIONS + 1], *files[: max(0, len(files) - MAX_FILES + 1)]}:
        # Another actor that starts may have removed it; one that still writes to it goes on without being read.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def read_folder(folder: Path, keys: Collection[int] | None = None) -> list[ActorTrace]:
    """All that can be read, as `read_trace` does; damaged files are passed over."""
    found: list[ActorTrace] = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                trace = read_trace(path.read_bytes(), path.name.rpartition(".")[0], keys)
                found += [trace] if trace is not None else []
    return found


def read_trace(content: bytes, actor_id: str, keys: Collection[int] | None = None) -> ActorTrace | None:
    """The records of one file; None if it is no such file, or of another version.

    With `keys`, the notes of these alone, and the steps of an actor that has any. A whole ring takes 60 ms, which for
    80 of them is more than whoever asks waits; looking for keys takes 3 ms.
    """
    if len(content) < _HEADER.size:
        return None
    magic, version, num_notes, num_steps, epoch, _ = _HEADER.unpack_from(content)
    if magic != _MAGIC or version != 1 or len(content) < _size(num_notes, num_steps):
        return None
    first_step = _HEADER.size + num_notes * _RECORD.size
    noted = content[_HEADER.size : first_step]
    notes = _records(noted, num_notes, keys)
    steps: list[Note] = []
    if notes or keys is None:
        steps = _records(content[first_step : first_step + num_steps * _RECORD.size], num_steps, None)
    return ActorTrace(actor_id, epoch, notes, steps, _num_lost(noted))


def _records(content: bytes, capacity: int, keys: Collection[int] | None) -> list[Note]:
    words = array("I", content)
    numbers, ends = words[::_WORDS], words[_WORDS - 1 :: _WORDS]
    places = range(capacity) if keys is None else [at for at, key in enumerate(words[4::_WORDS]) if key in keys]
    # 0 was never written. (After 2^32 of them numbers begin again, which orders a few of them wrongly, once.)
    whole = [at for at in places if numbers[at] and numbers[at] == ends[at] and numbers[at] % capacity == at]
    return [_note(content, at) for at in sorted(whole, key=lambda at: numbers[at])]


def _note(content: bytes, place: int) -> Note:
    _, kind, _, at, key, a, b, _ = _RECORD.unpack_from(content, place * _RECORD.size)
    return Note(at, kind, key, a, b)


def _num_lost(content: bytes) -> int:
    """Numbers begin at 1 and none is left out, so the last one says how many notes there were."""
    words = array("I", content)
    columns = zip(words[::_WORDS], words[_WORDS - 1 :: _WORDS], strict=True)
    whole = [number for number, end in columns if number and number == end]
    return max(0, max(whole, default=0) - len(whole))
