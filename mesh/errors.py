"""What can go wrong between actors.

    MeshError
    ├── BadSetting            bad_setting            an environment variable has a value that cannot be used
    ├── BindError             cannot_bind            an address could not be listened on
    ├── FrameRefused          bad_header, …          bytes from a peer that are not a frame of this protocol
    ├── Superseded            superseded             the registry knows a later incarnation of this actor
    ├── WrongMesh             wrong_mesh             the registry that was found is another mesh's
    │   └── WrongSpec         wrong_spec             the mesh serves something else than this host would
    └── CallError                                    everything that `ask` and `stream` raise
        ├── DeadlineExceeded  deadline_exceeded  r   the time given has passed
        ├── PeerLost          peer_lost          r   the peer died, restarted or was cut off while asked
        ├── Unreachable       unreachable        r   not a member, or the way to it is full
        ├── MailboxFull       mailbox_full       r   too many calls in flight here
        ├── TooLarge          too_large              the message is over the mesh's limits
        ├── Cancelled         cancelled              the other side no longer wants it
        └── RemoteError       (the peer's code)      the peer answered with an error

`r`: retryable, the same call may succeed if made again, here or at another actor. Codes are what crosses the wire and
what metrics are labelled with; they never change meaning.
"""

from typing import Final

SUPERSEDED: Final = "superseded"
"""A hello of an incarnation of which the receiver knows a later one."""

STALE_EPOCH: Final = "stale_epoch"
"""The same, answered by a registry to a join."""

WRONG_EPOCH: Final = "wrong_epoch"
"""A frame for another incarnation than the receiver, whose epoch is `known_epoch`."""

WRONG_MESH: Final = "wrong_mesh"
"""A join for another mesh than the registry's."""

WRONG_SPEC: Final = "wrong_spec"
"""A join of a host whose model, layout or the like are not the mesh's."""

BAD_PROOF: Final = "bad_proof"
"""A member shows a proof that is not its own, see `mesh/membership/proof.py`."""

NO_PROOF: Final = "no_proof"
"""A member shows no proof where one is needed: for its id, its role, or what it wants done."""

TOO_MANY_PEERS: Final = "too_many_peers"
"""A hello to an actor that has `SystemOptions.max_peers` links already."""

NO_HANDSHAKE: Final = "no_handshake"
"""A connection that ended before ZeroMQ's handshake: a probe of the port, or who dialed and was stopped."""

UNKNOWN_KEY: Final = "unknown_key"
"""A connection from another host is encrypted by a key that is not allowed, or not any more."""

WRONG_KEY: Final = "wrong_key"
"""A member of another host than that whose key its connection is encrypted by."""

WRONG_ROLE: Final = "wrong_role"
"""A member of a role that its host is not granted, see `mesh/membership/keys.py`."""

NOT_PERMITTED: Final = "not_permitted"
"""A message from another host that its sender's role is not for, see `mesh/membership/permissions.py`."""

PROOF_CODES: Final = (BAD_PROOF, NO_PROOF, WRONG_KEY, WRONG_ROLE)
"""Somebody is not who it says, and a greeting is answered so."""

NOT_SERVED: Final = "not_served"
"""An ask of a kind that the receiver does not answer; another of its role may."""


class TypedError(Exception):
    """Base of every error that crosses the wire or ends a start: `message` says what is wrong, why, and what to do.

    A kind says its code with its class, `class PoolBusy(PoolError, code="pool_busy")`; `retryable` is its base's unless
    it says otherwise. `param` names the offending field, or the option, where there is one.
    """

    code: str = "failed"
    retryable: bool = False
    param: str | None = None

    def __init_subclass__(
        cls, *, code: str | None = None, retryable: bool | None = None, param: str | None = None
    ) -> None:
        super().__init_subclass__()
        # Only what is said: what is not stays the base's.
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


class FrameRefused(MeshError):
    """Bytes that are not a frame of this protocol, or not meant for this incarnation.

    Codes: bad_header, bad_body, too_large, too_many_parts, wrong_epoch, superseded, wrong_version, unknown_verb,
    wrong_sender, no_hello, unknown_call, bad_proof, no_proof, unknown_key, wrong_key, wrong_role, no_handshake.
    """

    def __init__(self, code: str, message: str = "", *, known_epoch: int = 0) -> None:
        super().__init__(message or code.replace("_", " "))
        self.code = code
        self.known_epoch = known_epoch


class Superseded(MeshError, code=SUPERSEDED):
    """This incarnation is over: those it needs know a later one, of `known_epoch`; the next one goes above that."""

    def __init__(self, message: str, known_epoch: int) -> None:
        super().__init__(message)
        self.known_epoch = known_epoch


class WrongMesh(MeshError, code=WRONG_MESH):
    """The registry that was found is another mesh's, and takes no members for this one."""


class WrongSpec(WrongMesh, code=WRONG_SPEC):
    """The mesh serves something else than this host would: another model, layout, or the like; says what differs."""


class CallError(MeshError, code="call_failed"):
    """Everything that `ask` and `stream` raise."""


class DeadlineExceeded(CallError, code="deadline_exceeded", retryable=True):
    """The time given has passed; the peer may or may not have done what was asked."""


class PeerLost(CallError, code="peer_lost", retryable=True):
    """The peer died, restarted, stopped answering or was cut off; it may or may not have done what was asked.

    `was_heard` False: not a word came from that incarnation over this connection; most likely nobody was there.
    `reason` is how it was lost, where that is known.
    """

    was_heard = True
    reason = ""


class Unreachable(CallError, code="unreachable", retryable=True):
    """Nothing was sent: the peer is not a member, or the way to it is full."""


class MailboxFull(CallError, code="mailbox_full", retryable=True):
    """Nothing was sent: this actor has as many calls in flight as it may."""


class TooLarge(CallError, code="too_large"):
    """Nothing was sent: the message is over the mesh's limits."""


class Cancelled(CallError, code="cancelled"):
    """The other side no longer wants the answer."""


class RemoteError(CallError):
    """The peer answered with an error; `code`, `retryable`, `param` and `known_epoch` (0: none) are the peer's."""

    def __init__(
        self, code: str, message: str, retryable: bool = False, param: str | None = None, known_epoch: int = 0
    ) -> None:
        super().__init__(message, param)
        self.code = code
        self.retryable = retryable
        self.known_epoch = known_epoch
