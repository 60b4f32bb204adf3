"""What a mesh needs of the limits that the system sets to processes, and which of them are too low for it. Pure.

`meshctl up` refuses to start below these, and `meshctl doctor` says so: beyond them actors would fail one after the
other, and each in its own words. Figures are of Linux 6 on x86-64 with torch 2 for the CPU; some need depends on the
libraries' builds, so a limit just above may be met all the same, and is named then (`mesh/runtime/process_limits.py`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cli.errors import LimitTooLow
from cli.plan.settings import Settings
from mesh.runtime.process_limits import (
    ADDRESS_SPACE,
    DATA,
    FILE_SIZE,
    FILES,
    LEAST_PEERS,
    OWN_FILES,
    PEER_FILES,
    PROCESSES,
    SMALL_STACK_BYTES,
    STACK,
    TASKS,
    Limit,
    Limits,
)
from nodes import roles
from nodes.gateway.http.acceptor import RESERVED_FILES

_MIB: Final = 1 << 20

_FILES_BESIDE: Final = {
    # With one connection at least, or it would refuse everybody.
    roles.GATEWAY: RESERVED_FILES + 1,
    # Its store on disk: index and slots.
    roles.KV_AGENT: 8,
    # Two children, for chat templates and for clients' schemas, with a pipe each way.
    roles.TOKENIZER: 8,
}
_FILES_OF_A_POOL: Final = 4
"""Two at rest; as many for another incarnation's, before it is gone."""

_OWN_TASKS: Final = 8
"""The supervisor's three threads and one that reads files for it, the zygote, its spare and their helpers."""
_TASKS: Final = {
    # Lanes of its store, one thread that listens and some that move pages.
    roles.KV_AGENT: 10,
    # Its two children, and a thread for long texts.
    roles.TOKENIZER: 7,
    roles.DETOKENIZER: 5,
    # The runner, torch's own, the grammars'; threads that compute are counted apart.
    roles.WORKER: 6,
}
_TASKS_OF_OTHERS: Final = 4
"""An actor's loop, ZeroMQ's two threads, and one for slow calls."""

_ADDRESS_BYTES: Final = {False: 384 * _MIB, True: 1024 * _MIB}
"""Without and with torch: 366 and 852 MiB were mapped by a small actor, 951 to 1,083 by a worker."""
_DATA_BYTES: Final = {False: 128 * _MIB, True: 320 * _MIB}
"""The same of what may be written: 50 and 225 MiB, 304 of a worker of the bundled model; weights come on top."""
_LOGS: Final = 2
"""Logs are looked at every 10 s, so they grow beyond `max_log_bytes`; twice as much is ample."""


class Need(NamedTuple):
    """What somebody needs of a limit; bytes or a number. `why` is a clause."""

    limit: Limit
    amount: int
    why: str


class Shortfall(NamedTuple):
    """A limit that is too low. `found` is a sentence, `do` how to raise it."""

    limit: Limit
    found: str
    do: str


class Load(NamedTuple):
    """What runs on this host: roles by actor id, and how many actors elsewhere may be linked to each.

    `num_threads` is of each worker that computes on the CPU; `pools` are their bytes, each in a file.
    """

    actors: Sequence[tuple[str, str]]
    num_elsewhere: int
    num_threads: int
    pools: Sequence[int]
    uses_torch: bool


_STACK: Final = Need(STACK, SMALL_STACK_BYTES, "libraries overflow a smaller one")
LEAST: Final = (
    Need(FILES, OWN_FILES + LEAST_PEERS * PEER_FILES, "that is what the smallest actor takes"),
    Need(PROCESSES, _OWN_TASKS, "a supervisor alone has so many"),
    Need(TASKS, _OWN_TASKS, "a supervisor alone has so many"),
    Need(ADDRESS_SPACE, _ADDRESS_BYTES[False], "the smallest actor maps so much"),
    Need(DATA, _DATA_BYTES[False], "the smallest actor takes so much"),
    _STACK,
    Need(FILE_SIZE, _MIB, "logs alone are larger"),
)
"""What every mesh needs. It is asked for before the model is looked at, which already takes a process."""


def needs(settings: Settings, load: Load) -> list[Need]:
    """What this mesh needs, of each limit as much as the process that needs most."""
    files = [(_files_of(role, load), actor_id) for actor_id, role in load.actors]
    num_tasks = _num_tasks(load)
    tasks = f"{len(load.actors)} actors and their supervisor have so many"
    pools, linked = sum(load.pools), len(load.actors) + load.num_elsewhere
    most, whose = max(files, default=(0, ""))
    disk = settings.kv.disk.size_bytes if settings.kv.disk.directory else 0
    file_bytes = max(*load.pools, disk, _LOGS * settings.supervision.max_log_bytes, 0)
    return [
        Need(FILES, most, f"{whose} takes so many for {linked} peers"),
        Need(PROCESSES, num_tasks, tasks),
        Need(TASKS, num_tasks, tasks),
        Need(ADDRESS_SPACE, _ADDRESS_BYTES[load.uses_torch] + pools, "an actor maps so much, pools included"),
        Need(DATA, _DATA_BYTES[load.uses_torch], "an actor takes so much"),
        _STACK,
        Need(FILE_SIZE, file_bytes, "the largest pool, store on disk or log is a file of this size"),
    ]


def shortfalls(needed: Iterable[Need], limits: Limits) -> list[Shortfall]:
    """The limits that are too low, in the order of the needs."""
    found: list[Shortfall] = []
    for limit, amount, why in needed:
        left = limits.left(limit)
        if left is not None and left < amount:
            value, wanted = limit.amount(limits.values[limit]), limit.amount(amount)
            of_others = f", of which others have {limits.used[limit]:,}" if limit in limits.used else ""
            text = f"`{limit.shown_by}` is {value}{of_others}, and {wanted} are needed: {why}"
            # What others have is needed besides.
            wanted = limit.amount(amount + limits.used.get(limit, 0))
            found.append(Shortfall(limit, text, f"raise it to {wanted} or more: {limit.do}"))
    return found


def require(needed: Iterable[Need], limits: Limits) -> None:
    """Raise LimitTooLow for the first limit that is too low."""
    for limit, found, do in shortfalls(needed, limits):
        raise LimitTooLow(f"a limit of the system is too low: {limit.name}", why=found, do=do)


def num_connections(limits: Limits, num_peers: int) -> int | None:
    """How many clients a gateway can hold beside `num_peers` actors; None for any number."""
    left = limits.left(FILES)
    return None if left is None else max(0, left - OWN_FILES - PEER_FILES * num_peers - RESERVED_FILES)


def _files_of(role: str, load: Load) -> int:
    # All others may dial it and be dialed, the supervisor too, but not itself.
    linked = len(load.actors) + load.num_elsewhere
    pools = _FILES_OF_A_POOL * len(load.pools) if role == roles.KV_AGENT else 0
    return OWN_FILES + PEER_FILES * linked + _FILES_BESIDE.get(role, 0) + pools


def _num_tasks(load: Load) -> int:
    num_of = Counter(role for _, role in load.actors)
    of_actors = sum(num * _TASKS.get(role, _TASKS_OF_OTHERS) for role, num in num_of.items())
    return _OWN_TASKS + of_actors + num_of[roles.WORKER] * load.num_threads
