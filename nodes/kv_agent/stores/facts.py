"""What an operator is told of an agent's stores: those it has open, those of others in its directory, and figures."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstore.store.installed.calls import OUTCOMES
from kvstore.store.place import StoreFound, StoreIdentity, find_stores
from nodes.protocol.stores import StoreFacts

if TYPE_CHECKING:
    from kvstore.store.interface import Store
    from nodes.kv_agent.stores.opening import OpenedStore

_REASONS: Final[Mapping[str, Sequence[str]]] = {
    "not_open": ("not open", "not stored, off"),
    "queue_full": ("queue full",),
    "changed": ("changed before", "changed meanwhile"),
    "read_only": ("not stored, read only",),
    "write_failed": ("write failed", "lost"),
    "flushed": ("flushed",),
}
"""Why pages were not stored, for `/metrics`, and how the parts of a store name it."""
_SUMS: Final = {
    "mesh_kv_disk_pages": "stored",
    "mesh_kv_disk_slots": "slots",
    "mesh_kv_disk_stored_pages_total": "written",
    "mesh_kv_disk_evicted_pages_total": "evicted",
    "mesh_kv_disk_corrupt_pages_total": "read corrupt",
}
"""Figures of all stores together, and how a store names them."""
_OF_INSTALLED: Final = {
    "mesh_kv_store_missing_pages_total": "read missing",
    "mesh_kv_store_unsigned_pages_total": "read unsigned",
    "mesh_kv_store_off": "off",
    **{
        f'mesh_kv_store_calls_total{{call="{call}",outcome="{outcome}"}}': f"call {call} {outcome}"
        for call in ("contains", "get", "put", "remove")
        for outcome in OUTCOMES
    },
}
"""The same, of stores that another package installs."""
_COUNTS: Final = {
    "queried": "queried",
    "found": "found",
    "read": "read",
    "stale": "read stale",
    "corrupt": "read corrupt",
    "unsigned": "read unsigned",
    "unreadable": "read failed",
    "written": "written",
    "evicted": "evicted",
    "retired_slots": "retired",
    "damaged_heads": "damaged heads",
}
"""What `StoreFacts.counts` has, and how a store names it."""


async def look_into(directory: str) -> Sequence[StoreFound]:
    """Every store in a directory; none if it cannot be read."""
    try:
        # In a thread: a disk may take its time.
        return await asyncio.to_thread(find_stores, directory)
    except OSError:
        return []


def facts_of_open(
    identity: StoreIdentity, store: "Store", num_queued: int, groups: Sequence[str], idle_s: float | None
) -> StoreFacts:
    """Of a store that this agent has open; `idle_s` ago its pages were found last, None: never."""
    figures = store.stats()
    # An installed store has none: what it has room for is its own affair.
    num_slots = int(figures.get("slots", 0))
    return StoreFacts(
        folder=identity.folder,
        is_open=True,
        is_loaded=store.is_loaded,
        groups=sorted(groups),
        layout=identity.layout_digest.hex(),
        numerics=identity.numerics,
        page_bytes=identity.page_bytes,
        tp_size=identity.tp_size,
        num_pages=int(figures.get("stored", 0)),
        num_slots=num_slots,
        num_bytes=identity.file_bytes(num_slots) if num_slots and not store.why_off else 0,
        used_s=-1.0 if idle_s is None else idle_s,
        num_queued=num_queued,
        why_buffered=store.why_buffered,
        why_read_only=store.why_read_only,
        why_off=store.why_off,
        last_failure=store.last_failure,
        counts={name: int(figures.get(source, 0)) for name, source in _COUNTS.items()},
    )


def with_others(opened: Sequence[StoreFacts], found: Sequence[StoreFound]) -> list[StoreFacts]:
    """Open stores with what the files say of them, then those in the directory that are not open here."""
    files: Mapping[str, StoreFound] = {one.path.name: one for one in found}
    own = [_with_files(facts, files[facts.folder]) if facts.folder in files else facts for facts in opened]
    known = {facts.folder for facts in opened}
    return [*own, *(_of_other(one.path, one) for one in found if one.path.name not in known)]


def figures_of(stores: "Collection[OpenedStore]", counts: Mapping[str, int], *, is_installed: bool) -> dict[str, float]:
    """For `/metrics`, of all stores together; `counts` are sums of what they count."""
    sums = _SUMS | _OF_INSTALLED if is_installed else _SUMS
    figures = {
        **{name: counts.get(source, 0) for name, source in sums.items()},
        "mesh_kv_disk_queued_pages": sum(one.writes.num_queued for one in stores),
        "mesh_kv_disk_buffered": any(one.store.why_buffered for one in stores),
        "mesh_kv_disk_read_only": any(one.store.why_read_only for one in stores),
        "mesh_kv_disk_off": any(one.store.why_off for one in stores),
        "mesh_kv_disk_stored_bytes_total": sum(
            one.store.stats().get("written", 0.0) * one.store.page_bytes for one in stores
        ),
        **{
            f'mesh_kv_disk_dropped_pages_total{{reason="{reason}"}}': number
            for reason, number in dropped(counts).items()
        },
    }
    return {name: float(figure) for name, figure in figures.items()}


def dropped(counts: Mapping[str, int]) -> dict[str, int]:
    """Pages that were not stored, by the reasons of `/metrics`."""
    return {reason: sum(counts.get(name, 0) for name in names) for reason, names in _REASONS.items()}


def _with_files(facts: StoreFacts, found: StoreFound) -> StoreFacts:
    written_s = _since(found)
    used_s = written_s if facts.used_s < 0 else min(facts.used_s, written_s)
    return replace(facts, num_bytes=found.num_bytes, used_s=used_s)


def _of_other(path: Path, found: StoreFound) -> StoreFacts:
    facts = StoreFacts(folder=path.name, num_bytes=found.num_bytes, used_s=_since(found))
    if (whose := found.identity) is None:
        return facts
    layout = whose.layout_digest.hex()
    return replace(facts, layout=layout, numerics=whose.numerics, page_bytes=whose.page_bytes, tp_size=whose.tp_size)


def _since(found: StoreFound) -> float:
    # A clock that was set back would make it negative, which means that nobody knows.
    return max(0.0, time.time() - found.written_at)
