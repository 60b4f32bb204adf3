"""Names of actors and where they listen."""

import re
from typing import Final, NamedTuple

from mesh.wire.message import HotPart

HOST_NAME: Final = r"^(?![0-9]+$)[a-z0-9][a-z0-9-]{0,11}$"
"""What a host may be called in a mesh of several: no number, which behind an actor's name is its rank."""
_HOST_OF_ID: Final = re.compile(r"\.((?![0-9]+(?:\.|$))[a-z0-9][a-z0-9-]{0,11})(?:\.[0-9]+)?$")

MAX_EPOCH: Final = 1 << 44
"""No epoch is so high: as many bits has a name of a pool's making; the clock's milliseconds, which some take, 41."""
MAX_HEARD_EPOCH: Final = 1 << 43
"""What others may say that somebody's epoch is. The other half is for going above it: by somebody's word nobody gets
where no later incarnation can be."""


class Address(NamedTuple):
    """One incarnation of an actor. Epochs of one actor id are ordered and issued by its supervisor."""

    actor_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.actor_id}#{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `ID#EPOCH`; raises ValueError if it is not one."""
        actor_id, separator, epoch = text.rpartition("#")
        if not separator or not actor_id:
            raise ValueError(f"not an address of the form ID#EPOCH: {text!r}")
        return cls(actor_id, int(epoch))


def host_of(actor_id: str) -> str:
    """The host in an actor's id (`kv-agent-0.d`, or `worker-decode-0.d.1` of rank 1).

    "" on a mesh of one host, and for the registry on any.
    """
    found = _HOST_OF_ID.search(actor_id)
    return found[1] if found is not None else ""


class Endpoint(HotPart, frozen=True):
    """Where an actor's two ROUTER sockets listen: `ipc://…`, `tcp://…`, or a name inside a simulation.

    `local_control` and `local_data`: what who is on the same host dials instead; "" where the others are that already.
    """

    control: str
    data: str
    local_control: str = ""
    local_data: str = ""

    @property
    def on_its_host(self) -> "Endpoint":
        """What who is on the same host dials: it lives on when the network does not."""
        return Endpoint(self.local_control, self.local_data) if self.local_control else self
