"""How an installed store is told whose pages it keeps. Without numpy."""

import hmac
from collections.abc import Mapping
from typing import Any, Final

from kvstore.store.installed.plugins import StoreContext
from kvstore.store.place import FOLDER, StoreIdentity

HEADER_BYTES: Final = 64
"""Before each page, as in a store on disk; also so that the page begins at a cache line."""


def digest_of(identity: StoreIdentity) -> bytes:
    """16 bytes, equal exactly if a page's hash means the same bytes."""
    return bytes.fromhex(identity.folder.removeprefix(FOLDER))


def value_bytes_of(identity: StoreIdentity) -> int:
    """Of one page at all ranks, and what is before it."""
    return HEADER_BYTES + identity.page_bytes * identity.tp_size


def context_of(
    identity: StoreIdentity, deadline_s: float, options: Mapping[str, Any], key: bytes = b""
) -> StoreContext:
    """What the maker of a store gets. `key` is that of values, empty if they are not signed."""
    # With a key, of those who have it: otherwise meshes of two keys would refuse and remove each other's values.
    whose = hmac.digest(key, digest_of(identity), "sha256")[:16] if key else digest_of(identity)
    return StoreContext(
        namespace=FOLDER + whose.hex(),
        layout_digest=identity.layout_digest,
        numerics=identity.numerics,
        page_bytes=identity.page_bytes,
        num_ranks=identity.tp_size,
        value_bytes=value_bytes_of(identity),
        deadline_s=deadline_s,
        options=options,
        is_signed=bool(key),
    )
