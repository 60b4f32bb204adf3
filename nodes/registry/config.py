"""Settings of one registry. Made by `cli` from the topology."""

from typing import Annotated, Any

import msgspec


class RegistryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A membership lasts `lease_s` seconds without renewal.

    `port`: where the registry's control channel listens on a mesh of several hosts, with the data channel on the next
    port; 0: any free ports. `spec` is what all hosts of the mesh have in common; `settings` is what a host without a
    topology file is given.
    """

    lease_s: float = 5.0
    """Without a heartbeat, after which an actor is no member."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65534)] = 0
    spec: dict[str, str] = {}
    settings: dict[str, Any] = {}
