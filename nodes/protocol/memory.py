"""Giving a group's memory back while the mesh lives, and taking it again.

    operator -> kv_agent               ReleaseMemory, ResumeMemory, ListMemory -> MemoryList
    kv_agent -> scheduler, worker,     LetGo -> HasLetGo
                other agents
    kv_agent -> worker                 TakeUp -> HasTakenUp

The agent that owns a group's pool holds what was wished, in the header of the pool's file, where it outlives every
process. Whoever asks it to `MapPool` meanwhile is refused (`memory_released`, retryable), so whoever dies and comes
back waits without memory. Everything here is idempotent and asked again until it is done.
"""

from typing import Final

from kvstore.protocol import PoolHandle
from mesh.wire.message import Message, Part

MEMORY_RELEASED: Final = "memory_released"
"""Code of every refusal because of a release: retryable, here after the resumption or at another group."""

KEEP: Final = "keep"
BACKUP: Final = "backup"
RELOAD: Final = "reload"
"""How weights go: not at all, into the host's memory, or away, to be read from disk again."""


class ReleaseMemory(Message, frozen=True):
    """Ask a kv_agent to have worker groups give their memory back; empty `groups`: all of its own.

    Attempts that run there are failed (`memory_released`, retryable), and the KV cache is lost, unless `keep_kv`. How
    weights go, if not `keep_weights`, is the worker's matter: backed up in the host's memory if its memory saver is on,
    dropped in host memory; on a device without memory saver only if `reload_weights` says that dropping them and
    reading them from disk again is wanted. Answered at once; asked again it says how far it is.

    Errors: `unknown_group`, `nothing_to_release`, `memory_saver_off`, `already_released` (otherwise: resume first),
    `keep_weights` and `keep_kv` (they end with the workers: of tensor-parallel ranks, of pools that workers make).
    """

    groups: list[str] = []
    keep_weights: bool = False
    keep_kv: bool = False
    reload_weights: bool = False


class ResumeMemory(Message, frozen=True):
    """Ask a kv_agent to have groups take their memory again; empty `groups`: all. Answered at once.

    A pool that was freed is made again as another incarnation. Errors: `unknown_group`.
    """

    groups: list[str] = []


class ListMemory(Message, frozen=True):
    """Ask a kv_agent how its groups stand."""


class GroupMemory(Part, frozen=True):
    """One group. `state`: `held`, `releasing`, `released`, `resuming`.

    `weights` says how they are released: empty (not at all), `keep`, `backup` (in the host's memory) or `reload` (gone,
    read from disk again). `pool_bytes` is what the pool takes now. `waiting_for` are actors that have not done their
    part yet; `reason` is why the last try to go on failed, if it did.
    """

    group: str
    state: str
    weights: str = ""
    pool_bytes: int = 0
    waiting_for: list[str] = []
    reason: str = ""


class MemoryList(Message, frozen=True):
    """Groups as they stand, in order of name. `note` says which hosts could not be asked, empty if all were."""

    groups: list[GroupMemory]
    note: str = ""


class LetGo(Message, frozen=True):
    """Ask of an agent to whoever mapped its pool: let go of it, and of weights as said, and begin nothing more.

    `number` orders `LetGo` and `TakeUp` of one agent incarnation; what is older than the last is ignored. A scheduler
    fails its attempts and ends; its next incarnation waits for the pool. A worker finishes the step that runs first.
    Answer `HasLetGo` once it is done. Errors, all retryable: `not_ready` (it ends itself instead), `superseded`.
    """

    group: str
    number: int
    is_kv: bool
    weights: str


class HasLetGo(Message, frozen=True):
    """The pool of `group` is not mapped here any more, and the weights are released as was said."""

    group: str
    number: int


class TakeUp(Message, frozen=True):
    """Ask of an agent to a worker that has let go: map this pool, have the weights again, and go on.

    Answer `HasTakenUp` once steps can be run. Errors, all retryable: `not_ready`, `superseded`. A worker that
    cannot ends instead, and the next one loads everything anew.
    """

    group: str
    number: int
    pool: PoolHandle


class HasTakenUp(Message, frozen=True):
    """Steps can be run."""

    group: str
    number: int
