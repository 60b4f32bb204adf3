"""What cores and actors note in a ring, as tests read it."""

from mesh.runtime.trace_ring import TraceRing, key_of, read_trace
from nodes.trace_notes import Noted


class NoteList:
    """Takes the place of `TraceRing.note`, for a core by itself."""

    def __init__(self) -> None:
        self.all: list[tuple[Noted, str, int, int]] = []

    def __call__(self, kind: int, request_id: str, a: int, b: int) -> None:
        self.all.append((Noted(kind), request_id, a, b))

    def take(self) -> list[tuple[Noted, str, int, int]]:
        """Those since the last call."""
        taken, self.all = self.all, []
        return taken


def noted_in(ring: TraceRing, request_id: str) -> list[tuple[Noted, int, int]]:
    """What a ring has of a request, in order."""
    trace = read_trace(ring.content, "", [key_of(request_id)])
    assert trace is not None, "a ring is readable"
    return [(Noted(note.kind), note.a, note.b) for note in trace.notes]
