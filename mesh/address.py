"""Addresses of actors and the endpoints where they listen."""

import re
from typing import Final, NamedTuple

from mesh.wire.message import HotPart

HOST_NAME: Final = r"^(?![0-9]+$)[a-z0-9][a-z0-9-]{0,11}$"
"""Valid host names in a mesh of several hosts. Not a number: after an actor's name, that would be its rank."""
_HOST_OF_ID: Final = re.compile(r"\.((?![0-9]+(?:\.|$))[a-z0-9][a-z0-9-]{0,11})(?:\.[0-9]+)?$")

MAX_EPOCH: Final = 1 << 44
"""Every epoch is below this: a pool's incarnation has 44 bits for one. The clock's milliseconds, which serve some
actors as epochs, take 41."""
MAX_HEARD_EPOCH: Final = 1 << 43
"""The highest epoch believed of an actor on the word of another. The half above it leaves room to go higher: no such
word can put an actor where no later incarnation is possible."""


class Address(NamedTuple):
    """One incarnation of an actor. The epochs of one actor id are ordered, and issued by its supervisor."""

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
    """Host in an actor id (`kv-agent-0.d`, `worker-decode-0.d.1`); "" on a mesh of one host and for the registry."""
    found = _HOST_OF_ID.search(actor_id)
    return found[1] if found is not None else ""


class Endpoint(HotPart, frozen=True):
    """Where an actor's two ROUTER sockets listen: `ipc://…`, `tcp://…`, or a name inside a simulation.

    `local_control` and `local_data`: what actors on the same host dial instead; "" if `control` and `data` are local.
    """

    control: str
    data: str
    local_control: str = ""
    local_data: str = ""

    @property
    def on_its_host(self) -> "Endpoint":
        """What actors on the same host dial: such a link survives a network failure."""
        return Endpoint(self.local_control, self.local_data) if self.local_control else self
