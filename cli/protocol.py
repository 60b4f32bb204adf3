"""What `meshctl` asks a supervisor, over the mesh like everybody else.

meshctl -> supervisor    ListActors -> ActorList; StopMesh -> Stopping; RestartActors -> Restarting;
                         ProveActor -> ActorProof; ListLogs -> LogList; ReadLogs -> LogParts
supervisor -> supervisor TakeAllowList -> AllowListTaken
meshctl -> supervisor -> kv_agent    ReleaseMemory, ResumeMemory, ListMemory -> MemoryList (`nodes/protocol/memory.py`)
"""

from typing import Final, get_args

from mesh.address import Endpoint
from mesh.membership.keys import AllowList
from mesh.membership.view import READY, SUPERVISOR
from mesh.supervision.events import DRAINED
from mesh.wire.codec import Codec
from mesh.wire.message import Message, Part
from nodes.actor_figures import ActorFigures
from nodes.context_length import ServedContext
from nodes.protocol.memory import ListMemory, MemoryList, ReleaseMemory, ResumeMemory


class ListActors(Message, frozen=True):
    """Ask for every actor of the mesh, living or not. With `figures` each is asked for what it uses and does.

    `whole_mesh`: the supervisors of other hosts are asked, too; who does not answer is in the notes. Without it they
    and their actors are those that are not supervised.
    """

    figures: bool = False
    whole_mesh: bool = False


class ActorStatus(Part, frozen=True):
    """One actor. `pid` 0 and an empty endpoint where there is no process; `reason` says why not, or what went before.

    `state` is that of `mesh/supervision/core.py`, or what the living actor says of itself. `notes` are what people
    should know of what it announces: whose pages come another way than was chosen. `num_starts` counts the processes
    that this supervisor asked for, `last_reason` is why the actor was last suspected, killed, or ended, so many seconds
    ago; it outlives a restart, and is empty where nothing has happened. `next_start_in_s` is None unless the actor
    waits to be started again. Who is not `supervised` was started by somebody else, and is only looked at. `host` is
    empty on a mesh of one host.
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

    def is_restarted(self, epoch: int, *, stay_away: bool) -> bool:
        """Whether a wish that found it at `epoch` is done: drained where it was to `stay_away`, else there again."""
        return self.state == DRAINED if stay_away else self.state == READY and self.epoch > epoch


class ActorList(Message, frozen=True):
    """Answer to `ListActors`, supervisor first, then in the order of the topology, then who is not supervised.

    `context` is what requests may have, and why; None from a supervisor that does not say. `notes` are what people
    should know of the mesh as a whole. `silent` are hosts of which nobody answers for the whole mesh.
    """

    mesh: str
    url: str
    model: str
    ready: bool
    actors: list[ActorStatus]
    context: ServedContext | None = None
    notes: list[str] = []
    silent: list[str] = []


class StopMesh(Message, frozen=True):
    """Ask the supervisor to drain everything and end; with `force` to kill everything and end.

    On a mesh of several hosts it means its own host. `host` names another one, to whose supervisor it is passed on
    (`absent_host` where the topology has it and it is no member, else `unknown_host`); with `whole_mesh` all others end
    before it.
    """

    reason: str
    force: bool = False
    host: str = ""
    whole_mesh: bool = False


class Stopping(Message, frozen=True):
    """Answer to `StopMesh`: it has begun. The end is the end of the supervisor's process."""

    pid: int


class RestartActors(Message, frozen=True, tag="RenewActors"):
    """Ask the supervisor to drain actors, named by id or by role, one after the other, and to start each again.

    With `stay_away` they are not started until they are asked for again. An unknown name is refused (`unknown_actor`),
    and then nothing happens to the others. On a mesh of several hosts names are those of all; it is passed on to the
    supervisor of the registry's host, which goes from host to host and tells each with `here` to see to its own.
    Refused (`restart_running`) while another is under way.
    """

    names: list[str]
    stay_away: bool = False
    here: bool = False


class Restarting(Message, frozen=True, tag="Renewing"):
    """Answer to `RestartActors`: it has begun. Actors meant, in their order, with the epochs they had.

    `note` says which hosts are not meant because they are not in the mesh, empty if all are.
    """

    epochs: dict[str, int]
    note: str = ""


class ProveActor(Message, frozen=True):
    """Ask the supervisor for the proof of an actor that is started by hand. Refused (`not_given`) for its own ones."""

    actor_id: str
    epoch: int
    role: str


class ActorProof(Message, frozen=True):
    """Answer to `ProveActor`: good for this incarnation in this role (`mesh/membership/proof.py`)."""

    proof: bytes


class ListLogs(Message, frozen=True):
    """Ask for whose logs there are on a host: the supervisor's own, or `host`, to whose supervisor it is passed on."""

    host: str = ""


class LogList(Message, frozen=True):
    """Answer to `ListLogs`: roles by actor id, and the other hosts that are in the mesh or should be."""

    roles: dict[str, str]
    hosts: list[str] = []


class ReadLogs(Message, frozen=True):
    """Ask for what was written to logs of a host, from a place on by actor id; `host` as in `ListLogs`.

    A place is a byte of the file, counted from where it was last cut (rotated): the file before it ends at 0. None
    means the last `num_lines`, or all where that is None too. Who has no log has written nothing.
    """

    places: dict[str, int | None]
    num_lines: int | None = None
    host: str = ""


class LogPart(Part, frozen=True):
    """What is in one log up to `place`, from where the next part begins; whether there is `more` by now.

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
    """Say whose keys are taken from now on, as the registry's host has it; refused (`wrong_key`) of any other host."""

    allowed: AllowList


class AllowListTaken(Message, frozen=True):
    """Answer to `TakeAllowList`: the version that the host has, which may be a later one."""

    version: int


_Memory = ReleaseMemory | ResumeMemory | ListMemory
_Questions = ListActors | StopMesh | RestartActors | ProveActor | ListLogs | ReadLogs | TakeAllowList | _Memory
_Answers = ActorList | Stopping | Restarting | ActorProof | LogList | LogParts | AllowListTaken | MemoryList

SUPERVISOR_CODEC: Final = Codec(
    _Questions | _Answers,
    # Whoever may ask this can end the whole mesh, and read what all of it has logged.
    senders=dict.fromkeys(get_args(_Questions), (SUPERVISOR,)),
)
