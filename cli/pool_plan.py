"""How many pages the KV pools of a mesh get: what was asked for, or what fits, in shared memory or on devices. Pure.

All pools of a mesh have as many pages, those of tensor-parallel ranks too. Used by `cli/topology.py`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from cli.device_pools import DeviceLoad, DeviceMemory, device_pages
from cli.errors import BadConfig, NoMemory
from cli.settings import Settings, parse_bytes
from cli.worker_groups import WorkerGroup
from kvstore.device import CPU
from kvstore.layout import KVLayout
from kvstore.page_pool import PoolInfo
from nodes.kv_agent.config import PoolConfig
from nodes.model_spec import ModelSpec

_MAX_DEFAULT_POOL_BYTES: Final = 512 << 20
_DEFAULT_CONTEXTS: Final = 4
_MIN_DEFAULT_TOKENS: Final = 16_384
_USABLE_SHARE: Final = 0.8
_MIN_POOL_TOKENS: Final = 256


class PoolPlan:
    """The pools of `groups`. `free_bytes` are those of the directory, `devices` what the devices in use have."""

    def __init__(
        self,
        settings: Settings,
        spec: ModelSpec,
        groups: Sequence[WorkerGroup],
        free_bytes: int,
        devices: Sequence[DeviceMemory],
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._groups = groups
        self._free_bytes = free_bytes
        self._devices = {memory.name: memory for memory in devices}
        self._num_workers = sum(group.tp_size for group in groups)
        # The pages of groups of few ranks are the largest.
        self._layout = max((group.layouts[0] for group in groups), key=lambda layout: layout.page_bytes)

    def pools(self, context_length: int, max_batch_tokens: int) -> list[PoolConfig]:
        """The pool of each rank of each group. Raises BadConfig or NoMemory."""
        if self._groups[0].devices[0] == CPU:
            num_pages = self._host_pages(context_length)
        else:
            num_pages = self._pages_on_devices(max_batch_tokens)
        return [
            PoolConfig(
                group=group.name,
                num_pages=num_pages,
                layout=layout,
                device=device,
                in_worker=self._settings.pool_in_worker,
            )
            for group in self._groups
            for layout, device in zip(group.layouts, group.devices, strict=True)
        ]

    def require_room(self, pools: Sequence[PoolConfig]) -> int:
        """Bytes that the pools' files take. Raises NoMemory if their directory has not as many."""
        num_bytes = sum(_file_bytes(pool.group, pool.num_pages, pool.layout, pool.device) for pool in pools)
        if num_bytes > self._free_bytes:
            raise NoMemory(
                f"the KV pools do not fit into {self._settings.kv.directory}",
                why=f"they take {_mib(num_bytes)} and {_mib(self._free_bytes)} are free",
                do="give fewer with --kv-pages or --kv-memory, or make it larger (docker: --shm-size)",
            )
        return num_bytes

    def _host_pages(self, context_length: int) -> int:
        kv, layout = self._settings.kv, self._layout
        if kv.pages is not None:
            return kv.pages
        if kv.memory is not None:
            num_pages = _pages_in(parse_bytes(kv.memory), layout)
            if num_pages < 2:
                raise BadConfig(
                    f"KV memory of {kv.memory} is too little",
                    why=f"a page of this model takes {layout.page_bytes} bytes, and two are the least",
                    do="give more with --kv-memory",
                )
            return num_pages
        share_bytes = int(self._free_bytes * _USABLE_SHARE / self._num_workers)
        fitting = _pages_in(min(share_bytes, _MAX_DEFAULT_POOL_BYTES), layout)
        if fitting < layout.num_pages_for(_MIN_POOL_TOKENS):
            raise NoMemory(
                f"{kv.directory} is too small for KV pools",
                why=f"{_mib(self._free_bytes)} are free for {self._num_workers} pools, and "
                f"{_MIN_POOL_TOKENS} tokens of {self._spec.name} take {_mib(_MIN_POOL_TOKENS * layout.token_bytes)}",
                do="make it larger (docker: --shm-size), or choose pages yourself with --kv-pages",
            )
        tokens = max(context_length * _DEFAULT_CONTEXTS, _MIN_DEFAULT_TOKENS)
        return min(layout.num_pages_for(tokens) + 1, fitting)

    def _pages_on_devices(self, max_batch_tokens: int) -> int:
        """As many as fit on the fullest device: groups on devices are of equal size."""
        settings, layout = self._settings, self._layout
        wanted = settings.kv.pages
        if wanted is None and settings.kv.memory is not None:
            wanted = max(2, parse_bytes(settings.kv.memory) // layout.page_bytes)
        least = layout.num_pages_for(_MIN_POOL_TOKENS) + 1
        num_workers = Counter(device for group in self._groups for device in group.devices)
        tp_size = self._groups[0].tp_size
        # One group alone has nobody to copy pages from or to.
        has_agent = not settings.pool_in_worker or len(self._groups) > 1
        return min(
            device_pages(
                self._devices[name],
                DeviceLoad(
                    self._spec, layout.dtype, max_batch_tokens, count, settings.mem_fraction, tp_size, has_agent
                ),
                layout,
                wanted,
                least,
            )
            for name, count in num_workers.items()
        )


def _file_bytes(group: str, num_pages: int, layout: KVLayout, device: str = CPU) -> int:
    return PoolInfo(group=group, num_pages=num_pages, layout=layout, incarnation=0, device=device).file_bytes


def _pages_in(num_bytes: int, layout: KVLayout) -> int:
    """Pages whose pool takes at most `num_bytes`, tables included."""
    low, high = 0, num_bytes // layout.page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if _file_bytes("", middle, layout) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
