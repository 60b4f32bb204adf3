"""What `meshctl` asks a supervisor, over the mesh, as any other peer does.

meshctl -> supervisor    ListActors -> ActorList; StopMesh -> Stopping; RestartActors -> Restarting;
                         ProveActor -> ActorProof; ListLogs -> LogList; ReadLogs -> LogParts
supervisor -> supervisor TakeAllowList -> AllowListTaken
meshctl -> supervisor -> gateway     FindCalls -> CallsFound (`nodes/protocol/records.py`)
meshctl -> supervisor    FindNotes -> NotesFound
meshctl -> supervisor -> kv_agent    ListStores -> StoreList; FlushStores -> StoresFlushed (`nodes/protocol/stores.py`)
meshctl -> supervisor -> scheduler   FindFates -> FatesFound (the same)
meshctl -> supervisor -> kv_agent    ReleaseMemory, ResumeMemory, ListMemory -> MemoryList (`nodes/protocol/memory.py`)
"""

from typing import Any, Final, get_args

from mesh.address import Endpoint
from mesh.membership.keys import AllowList
from mesh.membership.view import READY, SUPERVISOR
from mesh.supervision.events import DRAINED
from mesh.wire.codec import Codec
from mesh.wire.message import Message, Part
from nodes.actor_figures import ActorFigures
from nodes.context_length import ServedContext
from nodes.protocol.memory import ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.protocol.records import CallsFound, FindCalls, FindNotes, NotesFound
from nodes.protocol.stores import FatesFound, FindFates, FlushStores, ListStores, StoreList, StoresFlushed


class ListActors(Message, frozen=True):
    """Ask for every actor of the mesh, living or not; with `figures`, also for what each uses and does.

    With `pss` also for `pss_bytes` of each, which take a supervisor up to 20 ms of each actor.

    `whole_mesh`: the supervisors of other hosts are asked too, and the notes name those that do not answer. Without it,
    they and their actors are listed as not supervised.
    """

    figures: bool = False
    whole_mesh: bool = False
    pss: bool = False


class ActorStatus(Part, frozen=True):
    """One actor. Without a process, `pid` is 0 and the endpoint empty.

    `state` is that of `mesh/supervision/core.py`, or what the living actor says of itself. `notes` are for people: how
    far slow work is, and which agents' pages come by another transport than the chosen one. `num_starts` counts the
    processes that this supervisor asked for: the first, `num_requested_restarts`, which an operator wished, and
    `num_restarts`, which followed a death or a start that failed. `num_deaths` counts ends that nobody wished.
    `last_reason`, and `reason` with the same text, say why the actor was last
    suspected, killed, or ended, `last_reason_age_s` ago; they outlive a restart, and are empty if nothing has happened.
    `next_start_in_s` is None unless the actor waits to be started again. An actor that is not `supervised` was started
    by somebody else, and is only shown. `host` is empty on a mesh of one host. `pss_bytes` is its process's
    memory, in which what several share is divided among them. `numerics` is what a scheduler announces of its worker
    (`SchedulerAttributes.numerics`).
    """

    actor_id: str
    role: str
    pid: int
    epoch: int
    endpoint: Endpoint
    state: str
    num_restarts: int = 0
    uptime_s: float = 0.0
    reason: str = ""
    notes: list[str] = []
    num_starts: int = 0
    last_reason: str = ""
    last_reason_age_s: float = 0.0
    next_start_in_s: float | None = None
    supervised: bool = True
    host: str = ""
    figures: ActorFigures = ActorFigures()
    pss_bytes: int | None = None
    num_deaths: int = 0
    num_requested_restarts: int = 0
    numerics: str = ""

    def is_restarted(self, epoch: int, *, stay_away: bool) -> bool:
        """Whether a restart requested at `epoch` is done: drained with `stay_away`, else ready in a later epoch."""
        return self.state == DRAINED if stay_away else self.state == READY and self.epoch > epoch


class ActorList(Message, frozen=True):
    """Answer to `ListActors`: the supervisor, then actors in the order of the topology, then those not supervised.

    `context` is the context length that requests may have, and why; None if the supervisor does not say. `notes` are
    what people should know about the mesh as a whole. `silent` are the hosts that are not in the mesh, or whose
    supervisors did not answer a `whole_mesh` question. `at` is Unix time by the clock of the host that answers.
    `ends`: the supervisor has been told to end, with all its actors.
    """

    mesh: str
    url: str
    model: str
    ready: bool
    actors: list[ActorStatus]
    context: ServedContext | None = None
    notes: list[str] = []
    silent: list[str] = []
    at: float = 0.0
    ends: bool = False


class StopMesh(Message, frozen=True):
    """Ask the supervisor to drain everything and end; with `force` to kill everything and end.

    On a mesh of several hosts this means the supervisor's own host. `host` names another one: the request is passed on
    to its supervisor (if it is not a member, refused: `absent_host` if the topology has it, else `unknown_host`). With
    `whole_mesh` all other hosts end first.
    """

    reason: str
    force: bool = False
    host: str = ""
    whole_mesh: bool = False


class Stopping(Message, frozen=True):
    """Answer to `StopMesh`: stopping has begun. It is over when the supervisor's process ends."""

    pid: int


class RestartActors(Message, frozen=True, tag="RenewActors"):
    """Ask the supervisor to drain actors, named by id or by role, one after the other, and to start each again.

    With `stay_away` they are not started until a later request names them. An unknown name is refused
    (`unknown_actor`), and so is a supervisor (`not_restartable`); then nothing happens to the others either. On a mesh
    of several hosts, names may be of actors on any host: the request is passed on to the supervisor of the registry's
    host, which goes from host to host and tells each, with `here`, to restart its own. Refused (`restart_running`)
    while another restart is under way.
    """

    names: list[str]
    stay_away: bool = False
    here: bool = False


class Restarting(Message, frozen=True, tag="Renewing"):
    """Answer to `RestartActors`: it has begun. `epochs` has the actors concerned, in order, with the epochs they had.

    `note` says which hosts are left out because they are not in the mesh; empty if none is.
    """

    epochs: dict[str, int]
    note: str = ""


class ProveActor(Message, frozen=True):
    """Ask the supervisor for the proof of an actor that is started by hand. Refused (`not_given`) for its own."""

    actor_id: str
    epoch: int
    role: str


class ActorProof(Message, frozen=True):
    """Answer to `ProveActor`: valid for this incarnation in this role (`mesh/membership/proof.py`).

    `config`: of a gateway, the fields of the configuration that this mesh's gateways have.
    """

    proof: bytes
    config: dict[str, Any] = {}


class ListLogs(Message, frozen=True):
    """Ask which actors have logs on a host: the supervisor's own, or `host`, to whose supervisor this is passed on."""

    host: str = ""


class LogList(Message, frozen=True):
    """Answer to `ListLogs`: roles by actor id, and the other hosts that are in the mesh or should be."""

    roles: dict[str, str]
    hosts: list[str] = []


class ReadLogs(Message, frozen=True):
    """Ask for what was written to the logs of a host, each from a place on, by actor id; `host` as in `ListLogs`.

    A place is a byte offset from where the file was last cut (rotated): the file before it ends at 0. None means the
    last `num_lines`, or everything if that is None too. An actor without a log has written nothing.
    """

    places: dict[str, int | None]
    num_lines: int | None = None
    host: str = ""


class LogPart(Part, frozen=True):
    """Part of one log, up to `place`, where the next part begins; `more` if there already is a next part.

    `modified_at` is Unix time.
    """

    content: bytes
    place: int
    more: bool
    modified_at: float


class LogParts(Message, frozen=True):
    """Answer to `ReadLogs`, 1 MiB in all at most."""

    parts: dict[str, LogPart]


class TakeAllowList(Message, frozen=True):
    """Tell a host the allow list in force from now on. Refused (`wrong_key`) unless the registry's host sends it."""

    allowed: AllowList


class AllowListTaken(Message, frozen=True):
    """Answer to `TakeAllowList`: the version that the host now has, which may be a later one."""

    version: int


_Memory = ReleaseMemory | ResumeMemory | ListMemory
_Stores = ListStores | FlushStores | FindFates
_Looks = ListLogs | ReadLogs | FindCalls | FindNotes
_Questions = ListActors | StopMesh | RestartActors | ProveActor | TakeAllowList | _Looks | _Memory | _Stores
_Found = LogList | LogParts | CallsFound | NotesFound | StoreList | StoresFlushed | FatesFound
_Answers = ActorList | Stopping | Restarting | ActorProof | AllowListTaken | MemoryList | _Found

SUPERVISOR_CODEC: Final = Codec(
    _Questions | _Answers,
    # A peer that may ask this can end the whole mesh, and read everything that it has logged.
    senders=dict.fromkeys(get_args(_Questions), (SUPERVISOR,)),
)
