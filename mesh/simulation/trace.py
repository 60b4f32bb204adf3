"""The record of a simulation: a ring of its last messages, a counter per fault class, and one digest of everything."""

import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mesh.simulation.connection import Frames

FAULT_CLASSES = (
    "sent", "delivered", "dropped", "slowed", "duplicated", "reordered", "cut", "held", "reset", "lost", "refused",
    "link_down", "silent_down", "crash", "hang",
)  # fmt: skip


class TraceEntry(NamedTuple):
    """One message when sent (`due_s` None: it never arrives), or one event of the network."""

    at_s: float
    fate: str
    sender: str
    receiver: str
    detail: str
    due_s: float | None
    frames: Frames


class Trace:
    """Keeps the last `limit` entries (header and body of each message), and counts and digests all of them."""

    def __init__(self, limit: int, describe: Callable[[Frames], str] | None) -> None:
        self.counts: dict[str, int] = dict.fromkeys(FAULT_CLASSES, 0)
        self.entries: deque[TraceEntry] = deque(maxlen=limit)
        self.fingerprint = 0
        self._describe = describe or _hex

    def add(self, entry: TraceEntry) -> None:
        what = f"{entry.at_s!r} {entry.fate} {entry.sender} {entry.receiver} {entry.detail} {entry.due_s!r}"
        # A plain checksum: every message goes through it, and nobody forges a run.
        digest = zlib.crc32(what.encode(), self.fingerprint)
        for frame in entry.frames:
            digest = zlib.crc32(frame, digest)
        self.fingerprint = digest
        self.entries.append(entry._replace(frames=entry.frames[:2]))

    def report(self, last: int) -> str:
        entries = list(self.entries)[-last:]
        lines = [
            f"{entry.at_s:12.6f} {entry.fate:<9} {entry.sender} > {entry.receiver} {entry.detail} "
            f"{'' if entry.due_s is None else f'arrives {entry.due_s:.6f} '}{self._describe(entry.frames)}".rstrip()
            for entry in entries
        ]
        counts = " ".join(f"{name}={count}" for name, count in self.counts.items() if count)
        return "\n".join([*lines, counts])


def _hex(frames: Frames) -> str:
    return " ".join(f"{frame[:48].hex()}({len(frame)})" for frame in frames)
