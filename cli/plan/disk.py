"""Whether KV pages can be kept where `--kv-disk` says, as far as that is known before anything runs.

The agent opens its store once a worker has told how it computes (`nodes/kv_agent/stores`), and says then what remains:
that another agent has it, or that the file system has no locks.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cli.errors import BadConfig, NoMemory
from cli.plan.settings import Settings
from kvstore.errors import StoreError, StoreTooSmall
from kvstore.layout import KVLayout
from kvstore.pool.device import CPU
from kvstore.store.place import StoreFound, StoreIdentity, find_stores, require_own
from nodes.kv_agent.config import DiskConfig
from nodes.model_spec import ModelSpec


class DiskFound(NamedTuple):
    """A directory for pages: bytes that are free in its file system, and the stores that lie there."""

    free_bytes: int
    stores: Sequence[StoreFound] = ()


def look_at_disk(directory: str) -> DiskFound:
    """Raises BadConfig if nothing could be kept there."""
    try:
        require_own(Path(directory), is_ours=False)
        status = os.statvfs(directory)
        # Of an account that may write anything, root's, a read-only mount is all that this finds.
        if status.f_flag & os.ST_RDONLY or not os.access(directory, os.W_OK | os.X_OK):
            raise _unusable(directory, "this user cannot write there, or the file system is mounted read-only")
        return DiskFound(status.f_bavail * status.f_frsize, find_stores(directory))
    except StoreError as error:
        raise _unusable(directory, error.message) from None
    except OSError as error:
        raise _unusable(directory, error.strerror or str(error)) from None


def _unusable(directory: str, why: str) -> BadConfig:
    do = "name a directory of yours on a local disk (--kv-disk, or [kv.disk] directory)"
    return BadConfig(f"KV pages cannot be kept in {directory}", why=why, do=do)


def plan_disk(
    settings: Settings, layouts: Sequence[KVLayout], spec: ModelSpec, found: DiskFound | None
) -> DiskConfig | None:
    """The agent's stores; None if it has none. Raises BadConfig, or NoMemory if the disk has too little room."""
    disk = settings.kv.disk
    if not disk.directory:
        return None
    require_storable(settings, spec, "--kv-disk")
    # Groups of unlike numbers of ranks cut pages differently; what was given is for all of them.
    kinds = {(layout.digest, layout.page_bytes, layout.tp_size) for layout in layouts}
    size_bytes = disk.size_bytes // len(kinds)
    missing = 0
    for digest, page_bytes, tp_size in kinds:
        identity = StoreIdentity(host=settings.on, layout_digest=digest, page_bytes=page_bytes, tp_size=tp_size)
        try:
            num_slots = identity.num_slots(size_bytes)
        except StoreTooSmall as error:
            raise BadConfig(
                f"a disk of {disk.size} is too small for KV pages",
                why=error.message,
                do="give more with --kv-disk-size",
            ) from None
        missing += max(0, identity.file_bytes(num_slots) - _reserved(identity, found))
    if found is not None and missing > found.free_bytes:
        raise NoMemory(
            f"the KV pages do not fit into {disk.directory}",
            why=f"they take another {missing} bytes, but only {found.free_bytes} are free; stores there: "
            + (", ".join(f"{store.path} {store.num_bytes}" for store in found.stores) or "none"),
            do="give them less with --kv-disk-size, or make room: a store of another model or release can be removed",
        )
    return DiskConfig(directory=disk.directory, size_bytes=size_bytes, host=settings.on, bytes_per_s=disk.bytes_per_s)


def require_storable(settings: Settings, spec: ModelSpec, option: str) -> None:
    """Raises BadConfig, which names the option that has pages kept, if this model's or device's cannot be."""
    if settings.device != CPU:
        raise BadConfig(
            f"{option} cannot be used with --device {settings.device}",
            why="only pages in host memory can be stored and read back, not those on a device",
            do=f"leave {option} out, or compute on the CPU",
        )
    if spec.is_encoder:
        raise BadConfig(
            f"pages of {spec.name} cannot be used again",
            why="each of its positions sees the whole input, so that no two inputs have a page in common",
            do=f"leave {option} out",
        )


def _reserved(identity: StoreIdentity, found: DiskFound | None) -> int:
    """What a store of these pages has already, at most: how they are computed is known only when a worker runs."""
    alike = (
        store.num_bytes
        for store in (found.stores if found is not None else ())
        if store.identity is not None
        and (store.identity.host, store.identity.layout_digest, store.identity.page_bytes, store.identity.tp_size)
        == (identity.host, identity.layout_digest, identity.page_bytes, identity.tp_size)
    )
    return max(alike, default=0)
