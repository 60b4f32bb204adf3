"""Which greetings are refused, which senders are told that a frame was refused, and which refusals are logged. Pure.

    linked      error with the frame's message id, so that a call fails at once
    not linked  error with sequence 0, which ends the sender's link. Sent to members; in answer to a hello from an
                incarnation that is over, to another incarnation than this one, without proof, or for which there is no
                room; and in answer to a lease renewal, whose sender would otherwise wait and take this actor for gone
    never       in answer to errors and answers, or two peers could keep each other busy; nor to an impostor

Owned by `mesh/link/core.py`.
"""

from typing import Final, TypeVar

from mesh.address import Address
from mesh.errors import PROOF_CODES, TOO_MANY_PEERS, WRONG_EPOCH, FrameRefused
from mesh.link.outputs import Frames
from mesh.wire.frames import SYSTEM_CODEC, ErrorBody, Hello, Welcome
from mesh.wire.header import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, Header, Verb

_UNANSWERED: Final = frozenset((Verb.ERROR, Verb.REPLY, Verb.CANCEL, Verb.BYE))
REPORTED_CODES: Final = frozenset((*PROOF_CODES, TOO_MANY_PEERS))
"""Reasons for refusing a hello that its sender must be told and should log, as it could not find out otherwise."""
_MAX_REMEMBERED: Final = 1024
"""Late frames come within seconds of a link's end, so the newest are enough: 1,024 are about 100 KB."""
_MAX_ACTORS: Final = 64
"""Actor ids are whatever a stranger claims: without a limit it could fill the log and this memory."""
_NEXT_S: Final = 60.0
"""Once `_MAX_ACTORS` are known, 1,440 lines a day and code: a new cause still shows within a minute."""

Greeting = TypeVar("Greeting", bound=Hello | Welcome)
Remembered = TypeVar("Remembered", Address, str)


def check_greeting(parts: Frames, kind: type[Greeting], peer: Address) -> Greeting:
    """The peer's hello or welcome; raises `FrameRefused`: none, of another actor, or no version in common."""
    body = SYSTEM_CODEC.decode(parts[1])
    if not isinstance(body, kind):
        raise FrameRefused("bad_body", f"a {kind.__name__.lower()} body was expected")
    first, last = (body.min_version, body.max_version) if isinstance(body, Hello) else (body.version, body.version)
    if last < MIN_PROTOCOL_VERSION or first > PROTOCOL_VERSION:
        raise FrameRefused("wrong_version", f"versions {first} to {last} offered; this actor speaks {PROTOCOL_VERSION}")
    if body.member.address != peer:
        raise FrameRefused("wrong_sender", f"introduces itself as {body.member.address}")
    return body


def later_incarnation(dialed: Address, header: Header, parts: Frames) -> Address | None:
    """The successor of `dialed` that this frame, received on the connection to `dialed`, announces; None if none."""
    if header.verb != Verb.ERROR or header.sender != dialed.actor_id or header.sender_epoch <= dialed.epoch:
        return None
    body = SYSTEM_CODEC.decode(parts[1])
    is_told = isinstance(body, ErrorBody) and (body.code, body.known_epoch) == (WRONG_EPOCH, header.sender_epoch)
    return Address(header.sender, header.sender_epoch) if is_told else None


def is_answered(header: Header, refusal: FrameRefused, *, is_linked: bool, is_member: bool) -> bool:
    # The answer would go to the actor whose name was claimed, which has sent nothing.
    if header.verb in _UNANSWERED or refusal.code == "wrong_sender":
        return False
    # The sender of a refused hello is told why: its epoch is over, it meant another epoch of this actor, it has not
    # proved its identity, or there is no room. It would otherwise wait 2 s for a welcome and take this for silence.
    is_told = header.verb == Verb.HELLO and (refusal.known_epoch > 0 or refusal.code in REPORTED_CODES)
    return is_linked or is_member or is_told or header.verb == Verb.HEARTBEAT


def error_body(refusal: FrameRefused) -> bytes:
    error = ErrorBody(code=refusal.code, message=refusal.message, known_epoch=refusal.known_epoch)
    return SYSTEM_CODEC.encode(error)


class LogOnce:
    """Which refusals deserve a warning: one per code and actor, and none for frames that merely came late.

    A stranger that invents actor ids must neither fill the log nor keep others' refusals out of it: per code, the first
    64 actors are logged at once, then one more a minute. Bounded.
    """

    def __init__(self) -> None:
        self._logged: dict[str, dict[str, None]] = {}
        self._next: dict[str, float] = {}
        self._ended: dict[Address, None] = {}

    def link_ended(self, peer: Address) -> None:
        """A link has ended: frames that the peer sent before it knew, or before it died, may arrive without a hello."""
        self._ended[peer] = None
        _keep(self._ended, _MAX_REMEMBERED)

    def is_new(self, peer: Address, refusal: FrameRefused, now: float) -> bool:
        """Whether to log this refusal; the same one is not new again."""
        # Codes are this program's own, so they are few; actor ids are whatever a sender claims.
        actors = self._logged.setdefault(refusal.code, {})
        # The first is common when a link ends under load, the second is how a successor at fixed ports is found.
        # Neither is anything to fix.
        is_late = (refusal.code == "no_hello" and peer in self._ended) or (
            refusal.code == WRONG_EPOCH and refusal.known_epoch > 0
        )
        is_full = len(actors) >= _MAX_ACTORS and now < self._next[refusal.code]
        if is_late or peer.actor_id in actors or is_full:
            return False
        actors[peer.actor_id] = None
        self._next[refusal.code] = now + _NEXT_S
        _keep(actors, _MAX_ACTORS)
        return True


def _keep(remembered: dict[Remembered, None], size: int) -> None:
    if len(remembered) > size:
        del remembered[next(iter(remembered))]
