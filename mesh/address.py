"""Names of actors and where they listen."""

from typing import NamedTuple

from mesh.wire.message import HotPart


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


class Endpoint(HotPart, frozen=True):
    """Where an actor's two ROUTER sockets listen: `ipc://…`, `tcp://…`, or a name inside a simulation."""

    control: str
    data: str
