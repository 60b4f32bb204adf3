"""What a supervisor refuses, with the codes that its answers carry, and which actors a request names. Pure."""

from collections.abc import Iterable

from cli.plan.faults import unknown_name
from mesh.errors import MeshError
from mesh.membership.view import SUPERVISOR


class Refused(MeshError):
    """A supervisor refuses a request."""


class UnknownActor(Refused, code="unknown_actor"):
    """No actor and no role has this name."""


class NotRestartable(Refused, code="not_restartable"):
    """The supervisor is meant, which nobody could start again."""


class NotRecordable(Refused, code="not_recordable"):
    """No new epoch can be recorded, so no actor could be started again."""


class NotGiven(Refused, code="not_given"):
    """Only the supervisor may start this actor, so nobody else gets a proof for it."""


class RestartRunning(Refused, code="restart_running", retryable=True):
    """One drain or restart at a time goes over the hosts of a mesh."""


class UnknownHost(Refused, code="unknown_host"):
    """No host of the mesh has this name."""


class AbsentHost(Refused, code="absent_host", retryable=True):
    """The host is one of the topology, but not in the mesh now."""


class NoAgent(Refused, code="no_agent", retryable=True):
    """No kv_agent is there to be asked."""


class UnknownStore(Refused, code="unknown_store"):
    """No kv_agent has a store of this name open."""


class UnknownGroup(Refused, code="unknown_group"):
    """No worker group has this name."""


def meant(names: Iterable[str], actors: Iterable[tuple[str, str]], absent: str = "") -> list[str]:
    """Ids of those of `actors` (id and role) that `names` refer to, in the order of the names, each once.

    Raises NotRestartable for a supervisor, and UnknownActor for a name that is neither id nor role; `absent` says which
    hosts may have it but cannot be asked.
    """
    roles = dict(actors)
    found: dict[str, None] = {}
    for name in names:
        if name == SUPERVISOR or name.startswith(f"{SUPERVISOR}."):
            raise NotRestartable("the supervisor cannot be drained or restarted by itself")
        ids = [actor_id for actor_id, role in roles.items() if name in (actor_id, role)]
        if not ids:
            fault = unknown_name(name, [*roles.values(), *roles], "actor or role")
            raise UnknownActor("; ".join(filter(None, (fault.why, absent, fault.do))))
        found |= dict.fromkeys(ids)
    return list(found)
