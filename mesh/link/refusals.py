"""What becomes of a frame that is refused: it is counted, a kind of it complained of once, and its sender told why.

    linked      error with the frame's message id, so that a call fails at once; 0 where the header told none
    not linked  error with sequence 0, which ends the sender's link: to members, to incarnations that are over, and to
                whoever renews a lease, who would wait for an answer here and take this actor for gone
    never       to errors and answers, or two peers could keep each other busy; nor to who claims another's name

Owned by `mesh/link/links.py`, which sends.
"""

from typing import Final, NamedTuple

import structlog

from mesh.address import Address
from mesh.errors import SUPERSEDED, FrameRefused
from mesh.link.complaints import Complaints
from mesh.runtime.telemetry import Metrics
from mesh.wire.frames import SYSTEM_CODEC, ErrorBody
from mesh.wire.header import Header, Verb

_UNANSWERED: Final = frozenset((Verb.ERROR, Verb.REPLY, Verb.ITEM, Verb.END, Verb.CREDIT, Verb.CANCEL, Verb.BYE))


class Answer(NamedTuple):
    """An `error` to send, its body encoded."""

    correlation_id: int
    body: bytes


class Refusals:
    """The refusals of one actor."""

    def __init__(self, metrics: Metrics, log: structlog.stdlib.BoundLogger) -> None:
        self._metrics = metrics
        self._log = log
        self._complaints = Complaints()

    def link_ended(self, peer: Address) -> None:
        """What still comes from this incarnation comes late, and is not worth a word."""
        self._complaints.link_ended(peer)

    def note(self, peer: Address, refusal: FrameRefused) -> None:
        """Count it, and log the first of its kind."""
        self._metrics.count("mesh_frames_refused_total", code=refusal.code)
        if self._complaints.is_new(peer, refusal.code):
            self._log.warning("frame refused", peer=str(peer), code=refusal.code, why=refusal.message)

    @staticmethod
    def answer(header: Header | None, refusal: FrameRefused, *, is_linked: bool, is_member: bool) -> Answer | None:
        """What its sender is told; None for nothing. `header` is None where it could not be read."""
        if header is None or header.verb in _UNANSWERED or refusal.code == "wrong_sender":
            return None
        if not (is_linked or is_member or refusal.code == SUPERSEDED or header.verb == Verb.HEARTBEAT):
            return None
        body = SYSTEM_CODEC.encode(ErrorBody(code=refusal.code, message=refusal.message))
        return Answer(header.message_id if is_linked else 0, body)
