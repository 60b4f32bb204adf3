"""Which greetings are refused, who is told that a frame was refused, and which refusals are logged. Pure.

    linked      error with the frame's message id, so that a call fails at once
    not linked  error with sequence 0, which ends the sender's link: to members, to incarnations that are over, to who
                says hello to another incarnation than this, has not proved who it is or finds no room, and to who
                renews a lease, who would wait for an answer here and take this actor for gone
    never       to errors and answers, or two peers could keep each other busy; nor to who claims another's name

Owned by `mesh/link/core.py`.
"""

from typing import Final, TypeVar

from mesh.address import Address
from mesh.errors import PROOF_CODES, TOO_MANY_PEERS, WRONG_EPOCH, FrameRefused
from mesh.link.outputs import Frames
from mesh.wire.frames import SYSTEM_CODEC, ErrorBody, Hello, Welcome
from mesh.wire.header import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, Header, Verb

_UNANSWERED: Final = frozenset((Verb.ERROR, Verb.REPLY, Verb.ITEM, Verb.END, Verb.CREDIT, Verb.CANCEL, Verb.BYE))
TOLD: Final = frozenset((*PROOF_CODES, TOO_MANY_PEERS))
"""Why a hello is refused that its sender has to be told of, and to log, as it cannot find out."""
_MAX_REMEMBERED: Final = 1024
_MAX_ACTORS: Final = 64
_NEXT_S: Final = 60.0

Greeting = TypeVar("Greeting", bound=Hello | Welcome)
Remembered = TypeVar("Remembered", Address, str)


def check_greeting(parts: Frames, kind: type[Greeting], peer: Address) -> Greeting:
    """The hello or welcome of a peer in a message.

    Raises `FrameRefused` if there is none, it is another actor's, or no version is in common.
    """
    body = SYSTEM_CODEC.decode(parts[1])
    if not isinstance(body, kind):
        raise FrameRefused("bad_body", f"the body of a {kind.__name__.lower()} is expected")
    first, last = (body.min_version, body.max_version) if isinstance(body, Hello) else (body.version, body.version)
    if last < MIN_PROTOCOL_VERSION or first > PROTOCOL_VERSION:
        raise FrameRefused("wrong_version", f"versions {first} to {last} offered, {PROTOCOL_VERSION} is spoken here")
    if body.member.address != peer:
        raise FrameRefused("wrong_sender", f"introduces itself as {body.member.address}")
    return body


def later_incarnation(dialed: Address, header: Header, parts: Frames) -> Address | None:
    """Who says, where `dialed` was dialed, that it is its successor; None if a frame does not say so."""
    if header.verb != Verb.ERROR or header.sender != dialed.actor_id or header.sender_epoch <= dialed.epoch:
        return None
    body = SYSTEM_CODEC.decode(parts[1])
    is_told = isinstance(body, ErrorBody) and (body.code, body.known_epoch) == (WRONG_EPOCH, header.sender_epoch)
    return Address(header.sender, header.sender_epoch) if is_told else None


def is_answered(header: Header, refusal: FrameRefused, *, is_linked: bool, is_member: bool) -> bool:
    """Whether the sender of a frame is told that it was refused."""
    # An answer would go to the actor whose name was claimed, which has sent nothing.
    if header.verb in _UNANSWERED or refusal.code == "wrong_sender":
        return False
    # Who greets in vain is told why: by its epoch, which is over, or by this one's, by what it has not proved, or as
    # there is no room for it, which it would wait 2 s to find out, and then call silence.
    is_told = header.verb == Verb.HELLO and (refusal.known_epoch > 0 or refusal.code in TOLD)
    return is_linked or is_member or is_told or header.verb == Verb.HEARTBEAT


def error_body(refusal: FrameRefused) -> bytes:
    """What the sender of the frame is told."""
    error = ErrorBody(code=refusal.code, message=refusal.message, known_epoch=refusal.known_epoch)
    return SYSTEM_CODEC.encode(error)


class LogOnce:
    """Which refusals are worth a warning: of each code each actor once, and none that only came late.

    A stranger that invents actor ids must not fill the log, nor keep what befalls others out of it: of each code 64
    actors are logged at once, then another one a minute. Bounded.
    """

    def __init__(self) -> None:
        self._logged: dict[str, dict[str, None]] = {}
        self._next: dict[str, float] = {}
        self._ended: dict[Address, None] = {}

    def link_ended(self, peer: Address) -> None:
        """What this incarnation sent before it knew, or before it died, may still come and has no hello before it."""
        self._ended[peer] = None
        _keep(self._ended, _MAX_REMEMBERED)

    def is_new(self, peer: Address, refusal: FrameRefused, now: float) -> bool:
        """Whether to log a refusal; it is not new a second time."""
        # Codes are those of this program, so they are few; actors are whatever somebody says.
        actors = self._logged.setdefault(refusal.code, {})
        # Common where a link ends under load, and how a successor at fixed ports is found; nobody could mend either.
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
