"""Stores of pages installed by other packages: entry points of the group `kvmesh.stores`.

`[kv.store] name` (`--kv-store`) names an entry point. The callable that it points to gets a `StoreContext` when an
agent opens its store, and returns an `InstalledStore`. docs/architecture.md says how to write one. Without numpy:
`meshctl up` looks here for what is installed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvstore.entry_points import installed, make_installed
from kvstore.errors import StoreUnmade

GROUP: Final = "kvmesh.stores"


class StoreContext(NamedTuple):
    """Whose pages a store is to keep, and what the settings say to it.

    `namespace` (letters, digits, `-`) is made of layout, numerics, bytes and ranks, and of the key if values are signed
    (`is_signed`): pages of two namespaces have other bits under the same hash, so it belongs into a store's keys. It is
    the same on every host of a mesh, and after each restart. A value has `value_bytes`: 64 of ours, then the page of
    each of `num_ranks` ranks, `page_bytes` each. A call that has not returned after `deadline_s` seconds is given up.
    `options` are the table `[kv.store.options]`.
    """

    namespace: str
    layout_digest: bytes
    numerics: str
    page_bytes: int
    num_ranks: int
    value_bytes: int
    deadline_s: float
    options: Mapping[str, Any]
    is_signed: bool = False


class InstalledStore(ABC):
    """Keeps values by hashes of 16 bytes. All methods may block, and are called by several threads at once.

    What a method raises, and an answer that has not one truth value for each hash, is a miss and counted. A call may
    have 64 values and 8 MiB of them, or one that is larger; `contains` as many hashes as a message has, 65,536 at most.
    """

    @abstractmethod
    def contains(self, hashes: Sequence[bytes]) -> Sequence[bool]:
        """Which of these are there. The answer decides whether `get` is worth calling, and promises nothing."""

    @abstractmethod
    def get(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Fill each buffer, of `value_bytes`, with the value of its hash; False where there is none."""

    @abstractmethod
    def put(self, hashes: Sequence[bytes], values: Sequence[memoryview]) -> Sequence[bool]:
        """Keep these values, which cannot be written and do not change; False for one that is not kept."""

    @abstractmethod
    def remove(self, hashes: Sequence[bytes]) -> None:
        """Forget these: what `get` gave was not their value. Those that are not there are no error."""

    def close(self) -> None:  # noqa: B027 - a store that holds nothing open has nothing to do
        """Called last, when no other call is running but those that were given up."""


def installed_stores() -> list[str]:
    """Names of the stores installed by other packages."""
    return installed(GROUP)


def load_store(name: str, context: StoreContext) -> InstalledStore:
    """Make the installed store of this name. May block for as long as it likes. Raises StoreUnmade."""
    return make_installed(GROUP, name, context, InstalledStore, "store", StoreUnmade)
