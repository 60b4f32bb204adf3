"""Errors between actors.

    MeshError
    ├── BadSetting            bad_setting            an environment variable has a value that cannot be used
    ├── BindError             cannot_bind            an address could not be listened on
    ├── LimitReached          limit_reached          a limit that the system sets to this process leaves no room
    ├── FrameRefused          bad_header, …          a frame from a peer that is malformed or not acceptable here
    ├── NotReadyInTime        not_ready_in_time      this actor did not become ready in the time that it was given
    ├── Superseded            superseded             the registry knows a later incarnation of this actor
    ├── WrongMesh             wrong_mesh             the registry that was found belongs to another mesh
    │   └── WrongSpec         wrong_spec             this host's model, layout or the like differs from the mesh's
    ├── CoreFailed            core_failed            a core of this actor raised, and has ended it
    ├── DrainFailed           drain_failed           this actor could not finish its work, as it raised
    ├── ActorFailed           actor_failed           this actor said that it cannot go on
    └── CallError                                    everything that `ask` raises
        ├── DeadlineExceeded  deadline_exceeded  r   the given time has passed
        ├── PeerLost          peer_lost          r   the peer died, restarted or was cut off while asked
        ├── Unreachable       unreachable        r   not a member, not to be dialed now, or outbox full
        ├── MailboxFull       mailbox_full       r   too many calls in flight here
        ├── TooLarge          too_large              the message exceeds the mesh's limits
        ├── Cancelled         cancelled              the other side no longer wants it, or an actor is stopping
        └── RemoteError       (the peer's code)      the peer answered with an error

`r`: retryable, the same call may succeed if made again, here or at another actor. Codes cross the wire and label
metrics; they never change meaning.
"""

from typing import Final

SUPERSEDED: Final = "superseded"
"""A hello from an incarnation when the receiver knows a later one."""

STALE_EPOCH: Final = "stale_epoch"
"""The same, as a registry's answer to a join."""

WRONG_EPOCH: Final = "wrong_epoch"
"""A frame meant for another incarnation than the receiver, whose own epoch is `known_epoch`."""

WRONG_MESH: Final = "wrong_mesh"
"""A join meant for another mesh than the registry's."""

WRONG_SPEC: Final = "wrong_spec"
"""A join from a host whose model, layout or the like differs from the mesh's."""

BAD_PROOF: Final = "bad_proof"
"""A member shows a proof that is not its own; see `mesh/membership/proof.py`."""

NO_PROOF: Final = "no_proof"
"""A member shows no proof where one is needed: for its id, its role, or what it requests."""

TOO_MANY_PEERS: Final = "too_many_peers"
"""A hello to an actor that has `SystemOptions.max_peers` links already."""

REGISTRY_FULL: Final = "registry_full"
"""A join that is one too many: one message could not hold all members. It may succeed once others have left."""

NO_HANDSHAKE: Final = "no_handshake"
"""A connection that ended before ZeroMQ's handshake: a port probe, or a dialing process that was stopped."""

UNKNOWN_KEY: Final = "unknown_key"
"""A connection from another host is encrypted with a key that is not, or no longer, allowed."""

WRONG_KEY: Final = "wrong_key"
"""A member's host is not the one whose key encrypts its connection."""

WRONG_ROLE: Final = "wrong_role"
"""A member has a role that its host is not granted; see `mesh/membership/keys.py`."""

NOT_PERMITTED: Final = "not_permitted"
"""A message from another host that its sender's role may not send; see `mesh/membership/permissions.py`."""

PROOF_CODES: Final = (BAD_PROOF, NO_PROOF, WRONG_KEY, WRONG_ROLE)
"""The sender is not who it claims to be; a refused greeting is answered with one of these."""

JOIN_CODES: Final = (REGISTRY_FULL, STALE_EPOCH, "too_large", WRONG_EPOCH, WRONG_MESH, WRONG_SPEC)
"""Why a registry refuses a member, beside `PROOF_CODES`."""

REFUSAL_CODES: Final = (
    *PROOF_CODES, *JOIN_CODES, NO_HANDSHAKE, NOT_PERMITTED, SUPERSEDED, TOO_MANY_PEERS, UNKNOWN_KEY,
    "bad_body", "bad_header", "no_hello", "too_many_parts", "too_many_topics", "unexpected", "unknown_verb",
    "wrong_sender", "wrong_version",
)  # fmt: skip
"""Why a frame is refused: the codes of `FrameRefused`."""

NOT_SERVED: Final = "not_served"
"""An ask of a kind that the receiver does not answer; another actor of its role may."""


class TypedError(Exception):
    """Base of every error that crosses the wire or aborts a start: `message` says what is wrong, why, and what to do.

    A subclass declares its code as in `class PoolBusy(PoolError, code="pool_busy")`, and inherits `retryable` unless it
    declares that too. `param` names the offending field or option, if there is one.
    """

    code: str = "failed"
    retryable: bool = False
    param: str | None = None

    def __init_subclass__(
        cls, *, code: str | None = None, retryable: bool | None = None, param: str | None = None
    ) -> None:
        super().__init_subclass__()
        # Only what is declared; the rest is inherited.
        for name, value in (("code", code), ("retryable", retryable), ("param", param)):
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if param is not None:
            self.param = param


class MeshError(TypedError, code="mesh_error"):
    """Base of all errors of the mesh."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class BadSetting(MeshError, code="bad_setting"):
    """An environment variable, named by `param`, has a value that cannot be used."""


class BindError(MeshError, code="cannot_bind"):
    """An address could not be listened on."""


class LimitReached(MeshError, code="limit_reached"):
    """A limit of the system (`mesh/runtime/process_limits.py`) leaves no room; the message has its name and value."""


class FrameRefused(MeshError):
    """A frame that is malformed, not meant for this incarnation, or otherwise not acceptable; `code` is one of
    `REFUSAL_CODES`.
    """

    def __init__(self, code: str, message: str = "", *, known_epoch: int = 0) -> None:
        super().__init__(message or code.replace("_", " "))
        self.code = code
        self.known_epoch = known_epoch


class NotReadyInTime(MeshError, code="not_ready_in_time"):
    """This actor was not ready, or no member of its mesh, in the time that it was given, and made no progress."""


class Superseded(MeshError, code=SUPERSEDED):
    """This incarnation is over: peers it needs know a later one, `known_epoch`, which its successor must exceed."""

    def __init__(self, message: str, known_epoch: int) -> None:
        super().__init__(message)
        self.known_epoch = known_epoch


class WrongMesh(MeshError, code=WRONG_MESH):
    """The registry that was found belongs to another mesh, and admits no members for this one."""


class WrongSpec(WrongMesh, code=WRONG_SPEC):
    """This host's model, layout or the like differs from the mesh's; the message says what differs."""


class CoreFailed(MeshError, code="core_failed"):
    """The core named `core` raised: its actor has logged the core's last events, and ends."""

    def __init__(self, core: str, message: str) -> None:
        super().__init__(message)
        self.core = core


class DrainFailed(MeshError, code="drain_failed"):
    """The actor's `drain` raised: its log has the traceback, and whoever still waits for an answer of it gets none."""


class ActorFailed(MeshError, code="actor_failed"):
    """The actor itself said that it cannot go on, see `Context.fail`: its supervisor counts a death."""


class CallError(MeshError, code="call_failed"):
    """Everything that `ask` raises."""


class DeadlineExceeded(CallError, code="deadline_exceeded", retryable=True):
    """The given time has passed; the peer may or may not have done what was asked."""


class PeerLost(CallError, code="peer_lost", retryable=True):
    """The peer died, restarted, stopped answering or was cut off; it may or may not have done what was asked.

    `was_heard` False: nothing was ever received from that incarnation over this link; most likely it was not there.
    `reason` is how it was lost, if known; `refusal` is the code with which the peer itself ended the link, if it did.
    """

    was_heard = True
    reason = ""
    refusal = ""


class Unreachable(CallError, code="unreachable", retryable=True):
    """Nothing was sent: the peer is not a member, cannot be dialed now, or its outbox is full."""


class MailboxFull(CallError, code="mailbox_full", retryable=True):
    """Nothing was sent: this actor already has as many calls in flight as it may."""


class TooLarge(CallError, code="too_large"):
    """Nothing was sent: the message exceeds the mesh's limits."""


class Cancelled(CallError, code="cancelled"):
    """The other side no longer wants the answer, or one of the two actors is stopping."""


class RemoteError(CallError):
    """The peer answered with an error; `code`, `retryable`, `param` and `known_epoch` (0: none) come from the peer."""

    def __init__(
        self, code: str, message: str, retryable: bool = False, param: str | None = None, known_epoch: int = 0
    ) -> None:
        super().__init__(message, param)
        self.code = code
        self.retryable = retryable
        self.known_epoch = known_epoch
