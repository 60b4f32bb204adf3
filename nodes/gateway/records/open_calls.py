"""The calls that a gateway has, in a file that outlives it: of one that is killed amid a call there is no other record.

    header   64 bytes: magic, number of slots, bytes of a slot
    slots    1,024 of 1,024 bytes: length (u32; 0: free), and the names of a call as JSON, as in the request log

The gateway maps it and writes a call into a free slot once its body has been read, and frees the slot at its end. Its
host's supervisor reads it when the gateway is dead (`cli/supervisor/kept/cut_calls.py`). A slot's length is written
after its content, so that one which was being written is free.
"""

import contextlib
import mmap
import os
import struct
from pathlib import Path
from typing import Final

import msgspec

from nodes.protocol.records import CallRecord

NUM_SLOTS: Final = 1024
"""Half of what a gateway takes at once by default (`max_inflight`); calls beyond that leave nothing, as without a file.
"""
SLOT_BYTES: Final = 1024
"""Names of a call are at most 128 characters each, and there are five; what is longer has no slot."""
SUFFIX: Final = ".open"

_HEADER: Final = struct.Struct("<8sII48x")
_LENGTH: Final = struct.Struct("<I")
_MAGIC: Final = b"kvopen01"
_SIZE: Final = _HEADER.size + NUM_SLOTS * SLOT_BYTES
NONE: Final = -1


def open_calls_path(folder: Path, actor_id: str, epoch: int) -> Path:
    """The file of one incarnation."""
    return folder / f"{actor_id}.{epoch}{SUFFIX}"


class OpenCalls:
    """Written by one gateway, on its loop's thread. The file is made for the first call; without room for it, never."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._has_failed = False
        # The last one freed is the next one taken: of a file with few calls at a time few pages are in memory.
        self._free = list(range(NUM_SLOTS - 1, -1, -1))

    def put(self, call: CallRecord) -> int:
        """The slot that it has until `free`; `NONE` if there is none for it."""
        content = msgspec.json.encode(call)
        memory = self._memory or self._map()
        if memory is None or not self._free or len(content) > SLOT_BYTES - _LENGTH.size:
            return NONE
        slot = self._free.pop()
        begin = _HEADER.size + slot * SLOT_BYTES
        memory[begin + _LENGTH.size : begin + _LENGTH.size + len(content)] = content
        _LENGTH.pack_into(memory, begin, len(content))
        return slot

    def free(self, slot: int) -> None:
        """The call is over; `NONE` is none."""
        if slot != NONE and self._memory is not None:
            _LENGTH.pack_into(self._memory, _HEADER.size + slot * SLOT_BYTES, 0)
            self._free.append(slot)

    def close(self) -> None:
        """The gateway ends of itself: all its calls have."""
        if self._memory is not None:
            self._memory.close()
            self._memory, self._has_failed = None, True
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _map(self) -> mmap.mmap | None:
        if self._has_failed:
            return None
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # Its blocks are taken now: writing into a mapping for which the disk has no room left is a SIGBUS.
                os.posix_fallocate(descriptor, 0, _SIZE)
                memory = mmap.mmap(descriptor, _SIZE)
            except OSError:
                self._path.unlink()
                raise
            finally:
                os.close(descriptor)
        except OSError:
            # A full disk: calls are served all the same.
            self._has_failed = True
            return None
        _HEADER.pack_into(memory, 0, _MAGIC, NUM_SLOTS, SLOT_BYTES)
        self._memory = memory
        return memory


def read_open_calls(content: bytes) -> list[CallRecord]:
    """The calls of one file, in no order; none if it is no such file. What cannot be read of it is passed over."""
    if len(content) != _SIZE or _HEADER.unpack_from(content) != (_MAGIC, NUM_SLOTS, SLOT_BYTES):
        return []
    found: list[CallRecord] = []
    for begin in range(_HEADER.size, _SIZE, SLOT_BYTES):
        (length,) = _LENGTH.unpack_from(content, begin)
        if 0 < length <= SLOT_BYTES - _LENGTH.size:
            begin += _LENGTH.size
            # Whatever is wrong with a damaged slot, the others are read.
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                found.append(msgspec.json.decode(content[begin : begin + length], type=CallRecord))
    return found
