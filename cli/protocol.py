"""What `meshctl` asks a supervisor, over the mesh like everybody else.

meshctl -> supervisor    ListActors -> ActorList; StopMesh -> Stopping; RenewActors -> Renewing
meshctl -> supervisor -> kv_agent    ReleaseMemory, ResumeMemory, ListMemory -> MemoryList (`nodes/protocol/memory.py`)
"""

from typing import Final

from mesh.address import Endpoint
from mesh.codec import Codec
from mesh.message import Message, Part
from nodes.protocol.memory import ListMemory, MemoryList, ReleaseMemory, ResumeMemory


class ListActors(Message, frozen=True):
    """Ask for every actor of the mesh, living or not."""


class ActorStatus(Part, frozen=True):
    """One actor. `pid` 0 and an empty endpoint where there is no process; `reason` says why not, or what went before.

    `state` is that of `mesh/supervision/core.py`, or what the living actor says of itself. `notes` are what people
    should know of what it announces: whose pages come another way than was chosen.
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


class ActorList(Message, frozen=True):
    """Answer to `ListActors`, supervisor first, then in the order of the topology."""

    mesh: str
    url: str
    model: str
    ready: bool
    actors: list[ActorStatus]


class StopMesh(Message, frozen=True):
    """Ask the supervisor to drain everything and end; with `force` to kill everything and end."""

    reason: str
    force: bool = False


class Stopping(Message, frozen=True):
    """Answer to `StopMesh`: it has begun. The end is the end of the supervisor's process."""

    pid: int


class RenewActors(Message, frozen=True):
    """Ask the supervisor to drain actors, named by id or by role, one after the other, and to start each again.

    With `stay_away` they are not started until they are asked for again. An unknown name is refused (`unknown_actor`),
    and then nothing happens to the others.
    """

    names: list[str]
    stay_away: bool = False


class Renewing(Message, frozen=True):
    """Answer to `RenewActors`: it has begun. Actors meant, in their order, with the epochs they had."""

    epochs: dict[str, int]


SUPERVISOR_CODEC: Final = Codec(
    ListActors
    | ActorList
    | StopMesh
    | Stopping
    | RenewActors
    | Renewing
    | ReleaseMemory
    | ResumeMemory
    | ListMemory
    | MemoryList
)
