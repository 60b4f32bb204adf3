"""Settings of one registry. Made by `cli` from the topology."""

from typing import Annotated, Any

import msgspec


class RegistryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A membership lasts `lease_s` seconds without renewal.

    `port`: where other hosts' actors find the registry on a mesh of several, the control channel there and the data
    channel at the next one; 0: any that are free. `spec` is what all hosts of it have in common, and `settings` what
    is told to a host that has no topology file.
    """

    lease_s: float = 5.0
    port: Annotated[int, msgspec.Meta(ge=0, le=65534)] = 0
    spec: dict[str, str] = {}
    settings: dict[str, Any] = {}
