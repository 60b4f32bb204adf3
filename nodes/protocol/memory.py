"""Releasing a group's memory while the mesh runs, and taking it again.

    operator -> kv_agent               ReleaseMemory, ResumeMemory, ListMemory -> MemoryList
    kv_agent -> scheduler, worker,     LetGo -> HasLetGo
                other agents
    kv_agent -> worker                 TakeUp -> HasTakenUp

The agent that owns a group's pool records the wish in the header of the pool's file, where it outlives every process.
Until the memory is resumed the agent refuses every `MapPool` (`memory_released`, retryable), so an actor that dies and
comes back waits without memory. All asks are idempotent and repeated until they are done.
"""

from typing import Final

from kvstore.protocol import PoolHandle
from mesh.wire.message import Message, Part

MEMORY_RELEASED: Final = "memory_released"
"""Code of every refusal because of a release: retryable, here once the memory is resumed, or at another group."""

KEEP: Final = "keep"
BACKUP: Final = "backup"
RELOAD: Final = "reload"
"""How weights are released: not at all, backed up in the host's memory, or dropped and later read from disk again."""


class ReleaseMemory(Message, frozen=True):
    """Ask a kv_agent to have worker groups release their memory; empty `groups`: all of its own groups.

    Attempts that run there fail (`memory_released`, retryable), and the KV cache is lost unless `keep_kv`. Unless
    `keep_weights`, weights in host memory are dropped; on a device they are backed up in the host's memory, for which
    the worker's memory saver must be on, or dropped with `reload_weights`. Dropped weights are read from disk again.
    Answered at once; asked again, the agent answers how far it is.

    Errors: `unknown_group`, `nothing_to_release`, `memory_saver_off`, `already_released` (another way: resume first),
    `keep_weights` (weights of tensor-parallel ranks end with the process).
    """

    groups: list[str] = []
    keep_weights: bool = False
    keep_kv: bool = False
    reload_weights: bool = False


class ResumeMemory(Message, frozen=True):
    """Ask a kv_agent to have groups take their memory again; empty `groups`: all. Answered at once.

    A pool that was freed is made again as a new incarnation. Errors: `unknown_group`.
    """

    groups: list[str] = []


class ListMemory(Message, frozen=True):
    """Ask a kv_agent for the memory state of its groups."""


class GroupMemory(Part, frozen=True):
    """One group. `state`: `held`, `releasing`, `released`, `resuming`.

    `weights` says how they are released: empty (not at all), `keep`, `backup` (in the host's memory) or `reload` (gone,
    to be read from disk again), which the others become when their worker dies. `pool_bytes` is the pool's current
    size. `waiting_for` are actors that have not done their part yet; `reason` is why the last attempt to go on failed,
    if it did.
    """

    group: str
    state: str
    weights: str = ""
    pool_bytes: int = 0
    waiting_for: list[str] = []
    reason: str = ""


class MemoryList(Message, frozen=True):
    """Memory state of groups, ordered by name. `note` says which hosts could not be asked; empty if all were."""

    groups: list[GroupMemory]
    note: str = ""


class LetGo(Message, frozen=True):
    """Ask by an agent to each actor that mapped its pool: release it, and weights as `weights` says; start no work.

    `number` orders `LetGo` and `TakeUp` of one agent incarnation; one older than the last is ignored. A scheduler
    fails its attempts and ends; its next incarnation waits for the pool. A worker first finishes the running step.
    Answer `HasLetGo` once it is done. Errors, all retryable: `not_ready` (it ends itself instead), `superseded`.
    """

    group: str
    number: int
    weights: str


class HasLetGo(Message, frozen=True):
    """The pool of `group` is not mapped here any more, and the weights are released as requested."""

    group: str
    number: int


class TakeUp(Message, frozen=True):
    """Ask by an agent to a worker that has let go: map this pool, restore the weights, and go on.

    Answer `HasTakenUp` once steps can be run. Errors, all retryable: `not_ready`, `superseded`. A worker that
    cannot do it ends instead, and the next one loads everything anew.
    """

    group: str
    number: int
    pool: PoolHandle


class HasTakenUp(Message, frozen=True):
    """Steps can be run."""

    group: str
    number: int
