"""Actors as a supervisor lists them."""

from typing import Any

from cli.protocol import ActorStatus
from mesh.address import Endpoint
from mesh.membership.view import READY


def actor(actor_id: str, **fields: Any) -> ActorStatus:
    """One that is ready. Its role, unless that is given, is what its id begins with."""
    known = {"role": actor_id.partition("-")[0], "pid": 7, "epoch": 1, "endpoint": Endpoint("c", "d"), "state": READY}
    return ActorStatus(actor_id=actor_id, **(known | fields))
