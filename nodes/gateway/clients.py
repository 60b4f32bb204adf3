"""Who sends a request, for as much of the mesh as is its part: an API key, else the address that it comes from. Pure.

    key alice              key:alice, with the weight of its key
    no key                 address:4f0c2a...   a salted hash; of IPv6 the /64, all of which one client may use
    a trusted proxy        the address that it names in X-Forwarded-For: the last one that is no trusted proxy's

Addresses stay here; neither they nor hashes of them are logged. All gateways of a mesh have the same salt.
"""

import hashlib
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple

from nodes.api_keys.entries import ApiKey

MAX_HOPS: Final = 32
"""Addresses that are looked at: more proxies in a row than there are anywhere."""
_HASH_BYTES: Final = 12
"""Among 10,000 clients, two have the same hash once in 10^21 meshes."""

Network = IPv4Network | IPv6Network


class Client(NamedTuple):
    """A client's name in the mesh, and its weight among others."""

    name: str
    weight: int = 1


NOBODY: Final = Client("")
"""What has no connection: an engine's calls, which are one client's."""
HEALTH: Final = Client("health")


def client_of(host: str) -> str:
    """Whose share a connection takes: an IPv4 address, or the /64 of an IPv6 one, all of which one client may use."""
    if ":" not in host:
        return host
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A provider gives each customer a /64 or more: counted by address, one client could be as many as it likes.
    return str(ip_network((int(address), 64), strict=False))


def read_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks, as `10.0.0.0/8` or `::1`. Raises ValueError that names the one at fault."""
    return tuple(ip_network(text) for text in texts)


class ClientNames:
    """Names clients. `trusted` are the addresses of proxies whose `X-Forwarded-For` is believed."""

    def __init__(self, trusted: Sequence[str] = (), salt: str = "") -> None:
        self._trusted = read_networks(trusted)
        self._salt = hashlib.blake2b(salt.encode()).digest()

    def address(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Where a request comes from, given the address of the connection."""
        if not self._trusted or not self._is_trusted(peer):
            return client_of(peer)
        # As one list: a proxy may add a header of its own instead of a part of the one that there is.
        values = [value for name, value in headers if name == b"x-forwarded-for"]
        hops = b",".join(values).decode("latin-1").rsplit(",", MAX_HOPS)[-MAX_HOPS:]
        for hop in reversed(hops):
            if (named := _without_port(hop.strip())) is None:
                # Whatever stands before it may be anybody's invention.
                break
            peer = named
            if not self._is_trusted(peer):
                break
        return client_of(peer)

    def of(self, key: ApiKey | None, address: str) -> Client:
        """The client of a request. Keys and addresses cannot be taken for each other."""
        if key is not None:
            return Client(f"key:{key.name}", key.weight)
        digest = hashlib.blake2b(address.encode(), digest_size=_HASH_BYTES, key=self._salt).hexdigest()
        return Client(f"address:{digest}")

    def _is_trusted(self, host: str) -> bool:
        try:
            address = ip_address(host)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)


def _without_port(hop: str) -> str | None:
    """The address of `1.2.3.4`, `1.2.3.4:80`, `::1`, `[::1]` or `[::1]:80`; None if it is none."""
    host = hop
    if hop.startswith("["):
        host = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        host = hop.partition(":")[0]
    try:
        return str(ip_address(host))
    except ValueError:
        return None
