"""Settings of one kv_agent. Made by `cli` from the topology."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kvstore.errors import DeviceUnavailable
from kvstore.layout import KVLayout
from kvstore.pool.device import CPU, memory_kind
from kvstore.store.installed.plugins import installed_stores
from kvstore.transfer.mapped.cuda_ipc import DEFAULT_COPIES_PER_POLL, DEFAULT_GATHER_FROM
from kvstore.transfer.mapped.shm import DEFAULT_QUANTUM_BYTES
from kvstore.transfer.paired.tcp.link import TCP, TcpSettings
from kvstore.transfer.plugins import installed_transports
from kvstore.transfer.session import DEFAULT_LIMITS, SessionLimits

CUDA_IPC: Final = "cuda_ipc"
NCCL: Final = "nccl"
SHM: Final = "shm"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAME_RULE: Final = "at most 100 letters, digits, '.', '_' or '-', and begin with a letter or digit"


class ConfigError(ValueError):
    """A setting cannot be used; the message says which and why."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of a group or of one of its ranks. `num_pages` includes padding. `device`: `cpu` or `cuda:N`."""

    group: str
    num_pages: int
    layout: KVLayout
    device: str = CPU

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.group):
            raise ConfigError(f"group {self.group!r} must be {_NAME_RULE} (it names a file)")
        if self.num_pages < 2:
            raise ConfigError(f"pool of {self.group} needs at least 2 pages (page 0 is padding), got {self.num_pages}")
        try:
            memory_kind(self.device)
        except DeviceUnavailable as error:
            raise ConfigError(f"pool of {self.group}: {error.message}") from None

    @property
    def name(self) -> str:
        """The agent's name for its segment, after the prefix. No other group may be named like a rank, `GROUP.RANK`."""
        return f"{self.group}.{self.layout.tp_rank}" if self.layout.tp_rank else self.group


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Stores of pages in `directory`, one for each model layout, number of ranks and numerics, each of `size_bytes`.

    `host` is the name of this host in its mesh, which a machine that takes its place has, too. At most `bytes_per_s`
    are written; 0: no limit.
    """

    directory: str
    size_bytes: int
    host: str = ""
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.directory.startswith("/"):
            raise ConfigError(f"disk.directory must be an absolute path, not {self.directory!r}")
        if self.size_bytes < 1 or self.bytes_per_s < 0:
            raise ConfigError("disk.size_bytes must be at least 1, and disk.bytes_per_s at least 0")

    @property
    def place(self) -> str:
        return self.directory


class InstalledStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pages are kept by the installed store `name` (`kvstore/store/installed/plugins.py`), which gets `options`.

    Each of its calls is given up after `deadline_s`. At most `bytes_per_s` are put; 0: no limit. With a `key_file`,
    values are signed with what it has, and those that are not are no pages; empty: they are not signed.
    """

    name: str
    options: Mapping[str, Any] = {}
    deadline_s: float = 5.0
    bytes_per_s: float = 0.0
    key_file: str = ""

    def __post_init__(self) -> None:
        if self.name not in installed_stores():
            have = ", ".join(installed_stores()) or "none"
            raise ConfigError(f"store.name must be that of an installed store (installed: {have}), not {self.name!r}")
        if self.deadline_s <= 0 or self.bytes_per_s < 0:
            raise ConfigError("store.deadline_s must be above 0, and store.bytes_per_s at least 0")

    @property
    def host(self) -> str:
        """Empty: what one host has put, others may get."""
        return ""

    @property
    def place(self) -> str:
        return f"the installed store {self.name}"


class KVAgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one host. Names of segments in `directory` begin with `prefix`, which names user and mesh.

    `device_transport` brings pages that other agents have on devices; `tcp` stages them in host memory. With `nccl` and
    `tcp`, a pair with each such agent must be made within `pair_timeout_s`.
    If that fails, nothing else is tried, unless `device_fallback` is `tcp`: pairs for which no communicator of NCCL
    could be made then use that, and the agent says so. `host_transport` brings pages that other agents have in host
    memory. Both may also name an installed transport (`kvstore/transfer/plugins.py`). Both ends of a pair must have the
    transport. `tcp` says how it listens and sends.

    `disk` or `store` is where pages of host memory are kept that schedulers tell to be stored; both None: nowhere.
    """

    pools: list[PoolConfig]
    directory: str = "/dev/shm"
    prefix: str = "kvmesh-"
    unlink_on_stop: bool = True
    """Without: pools stay in `/dev/shm` after an orderly stop."""
    quantum_bytes: int = DEFAULT_QUANTUM_BYTES
    """Copied at a time in host memory, before other work."""
    copies_per_poll: int = DEFAULT_COPIES_PER_POLL
    """Copies begun at a time on a device."""
    device_transport: str = CUDA_IPC
    """What brings pages that other agents have on devices: `cuda_ipc` (same host), `nccl`, `tcp`, or one installed."""
    pair_timeout_s: float = 20.0
    """For a connection to another agent."""
    device_wait_s: float = 15.0
    """How long a start waits for memory on a device that an earlier mesh, or an agent that died, still holds."""
    max_grants: int = 4096
    """Open grants."""
    max_remembered: int = 4096
    """Ended ones kept for late announcements."""
    limits: SessionLimits = SessionLimits()
    device_fallback: str = ""
    """With `nccl`: `tcp` for pairs for which no communicator could be made; empty: none."""
    host_transport: str = SHM
    """What brings pages in host memory: `shm` (same host), `tcp`, or one installed."""
    tcp: TcpSettings = TcpSettings()
    gather_from: int = DEFAULT_GATHER_FROM
    """From so many copies within a device on, one kernel, compiled at start, makes them; 0: each is a separate call."""
    disk: DiskConfig | None = None
    store: InstalledStoreConfig | None = None

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ConfigError(f"groups of a kv_agent must differ, got {', '.join(names)}")
        for group in self.groups.values():
            _check_ranks(group)
        if not _NAME.fullmatch(self.prefix):
            raise ConfigError(f"prefix {self.prefix!r} must be {_NAME_RULE} (it names files)")
        _check_transport(self.device_transport, f"device_transport must be {CUDA_IPC!r}, {NCCL!r} or {TCP!r}")
        if self.device_transport == NCCL and all(pool.device == CPU for pool in self.pools):
            raise ConfigError(f"device_transport {NCCL!r} moves pages on devices: give the pools a device")
        _check_transport(self.host_transport, f"host_transport must be {SHM!r} or {TCP!r}")
        if self.device_fallback not in ("", TCP):
            raise ConfigError(f"device_fallback must be empty or {TCP!r}, not {self.device_fallback!r}")
        if self.device_fallback and self.device_transport != NCCL:
            raise ConfigError(f"device_fallback needs device_transport {NCCL!r}, not {self.device_transport!r}")
        if self.disk is not None and any(pool.device != CPU for pool in self.pools):
            raise ConfigError("disk keeps pages of host memory: pools on devices cannot be stored")
        if self.store is not None and any(pool.device != CPU for pool in self.pools):
            raise ConfigError("store keeps pages of host memory: pools on devices cannot be stored")
        if self.store is not None and self.disk is not None:
            raise ConfigError("disk and store are both set: pages are kept in one of them")
        problem = self.tcp.problem()
        if problem:
            raise ConfigError(f"tcp: {problem}")

    @property
    def groups(self) -> dict[str, list[PoolConfig]]:
        """The pools of each group, by rank."""
        groups: dict[str, list[PoolConfig]] = {}
        for pool in sorted(self.pools, key=lambda pool: pool.layout.tp_rank):
            groups.setdefault(pool.group, []).append(pool)
        return groups


def _check_ranks(pools: list[PoolConfig]) -> None:
    """Check that pages of all ranks have the same numbers and hold the same tokens. Raises ConfigError."""
    first = pools[0]
    if [pool.layout.tp_rank for pool in pools] != list(range(first.layout.tp_size)):
        ranks = ", ".join(str(pool.layout.tp_rank) for pool in pools)
        raise ConfigError(f"{first.group} needs a pool for each of its {first.layout.tp_size} ranks, got ranks {ranks}")
    if len({(pool.num_pages, pool.layout.tp_size, pool.layout.digest) for pool in pools}) > 1:
        raise ConfigError(
            f"the pools of the ranks of {first.group} must have the same number of pages, tp_size and model layout"
        )


def _check_transport(name: str, ours: str) -> None:
    """Accept ours for this kind of memory, and installed ones: only the agent knows which memory those move."""
    if repr(name) in ours or (name not in (CUDA_IPC, NCCL, SHM, TCP) and name in installed_transports()):
        return
    installed = ", ".join(installed_transports()) or "none"
    raise ConfigError(f"{ours}, or the name of an installed transport (installed: {installed}), not {name!r}")


class Bounds(NamedTuple):
    """Limits of the whole agent: grants that may write, and ended ones kept to answer late announcements."""

    max_grants: int = 4096
    max_remembered: int = 4096
    session: SessionLimits = DEFAULT_LIMITS
