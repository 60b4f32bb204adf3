"""Settings of one registry. Made by `cli` from the topology."""

import msgspec


class RegistryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A membership lasts `lease_s` seconds without renewal."""

    lease_s: float = 5.0
