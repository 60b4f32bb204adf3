"""How many pages the KV pools of a mesh get: what was asked for, or what fits, in shared memory or on devices. Pure.

All pools of a mesh have the same number of pages, those of tensor-parallel ranks too. Their size bounds the context
that is served, since a request is decoded in one pool. Used by `cli/plan/topology.py`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final

from cli.errors import BadConfig, NoMemory
from cli.plan.devices import DeviceLoad, DeviceMemory, device_pages
from cli.plan.groups import WorkerGroup
from cli.plan.settings import Settings, parse_bytes
from kvstore.layout import KVLayout
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import PoolInfo
from nodes.amounts import amount
from nodes.context_length import ServedContext
from nodes.kv_agent.config import PoolConfig
from nodes.model_spec import ModelSpec

_MAX_DEFAULT_POOL_BYTES: Final = 512 << 20
"""43,000 tokens of a model of 0.5 billion parameters (192 KiB for 16): who wants more of the memory says so."""
_DEFAULT_CONTEXTS: Final = 4
_MIN_DEFAULT_TOKENS: Final = 16_384
"""So that a model with a short context still gets room for a batch: 16 requests of 1,024 tokens."""
_USABLE_SHARE: Final = 0.8
"""The rest is for other segments in the directory, often /dev/shm: a write there that does not fit is a SIGBUS."""
_LEAST_CONTEXT: Final = 2048
"""The least if no context length was given: with less, a model made for more is no use, and was hardly started so on
purpose (64 MiB of shared memory, a container's default, hold 450 tokens of a model of 0.6 billion parameters)."""


_OTHER_MEMORY: Final = "or place the pools in other memory ([kv] directory)"


class PoolPlan:
    """The pools of `groups`. `free_bytes` is the room in their directory, `devices` the memory of devices in use."""

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
        # Groups with the fewest ranks have the largest pages.
        self._layout = max((group.layouts[0] for group in groups), key=lambda layout: layout.page_bytes)
        self._is_on_host = groups[0].devices[0] == CPU
        self._wanted_context = _wanted_context(settings, spec)
        self._least_context = settings.context_length or min(self._wanted_context, _LEAST_CONTEXT)
        if settings.hosts and settings.kv.pages is None and settings.kv.memory is None:
            # Sized by its own free memory each host would serve another context, and no host knows what others have.
            self._least_context = self._wanted_context
        self._least_pages = self._layout.num_pages_for(self._least_context) + 1

    def pools(self, max_batch_tokens: int) -> list[PoolConfig]:
        """The pool of each rank of each group. Raises BadConfig or NoMemory."""
        num_pages = self._host_pages() if self._is_on_host else self._pages_on_devices(max_batch_tokens)
        if num_pages < self._least_pages:
            raise self._too_small(num_pages)
        return [
            PoolConfig(group=group.name, num_pages=num_pages, layout=layout, device=device)
            for group in self._groups
            for layout, device in zip(group.layouts, group.devices, strict=True)
        ]

    def context(self, pools: Sequence[PoolConfig]) -> ServedContext:
        """The context that a request may have: the smallest pool in which requests are decoded has to hold it."""
        decoding = {group.name for group in self._groups if group.phase != "prefill"}
        # Prefill groups decode too if there are no others. Otherwise their pools do not count: a prompt too long for
        # them is prefilled where it is decoded.
        sizes = [pool for pool in pools if pool.group in decoding] or pools
        kv_tokens = min((pool.num_pages - 1) * pool.layout.page_size for pool in sizes)
        length = min(self._wanted_context, kv_tokens)
        return ServedContext(
            length=length,
            model_length=self._spec.context_length,
            kv_tokens=kv_tokens,
            more_by="" if length == self._wanted_context else self._more_by(),
        )

    def require_room(self, pools: Sequence[PoolConfig]) -> list[int]:
        """Bytes that each pool's file takes. Raises NoMemory if their directory has less room."""
        sizes = [_file_bytes(pool.group, pool.num_pages, pool.layout, pool.device) for pool in pools]
        num_bytes = sum(sizes)
        if num_bytes > self._free_bytes:
            raise NoMemory(
                f"the KV pools do not fit into {self._settings.kv.directory}",
                why=f"they take {amount(num_bytes)}, but only {amount(self._free_bytes)} are free",
                do="make them smaller with --kv-pages or --kv-memory, or the directory larger (docker: --shm-size), "
                f"{_OTHER_MEMORY}",
            )
        return sizes

    def _more_by(self) -> str:
        kv = self._settings.kv
        if kv.pages is not None:
            return "--kv-pages"
        if self._is_on_host:
            return f"--kv-memory or a larger {kv.directory}"
        return "--mem-fraction or fewer groups" if kv.memory is None else "--kv-memory"

    def _too_small(self, num_pages: int) -> NoMemory:
        kv, layout = self._settings.kv, self._layout
        num_tokens = max(0, num_pages - 1) * layout.page_size
        needed = _file_bytes("", self._least_pages, layout)
        holds = f"{num_tokens:,} tokens of {self._spec.name}"
        least = f"a context of {self._least_context:,} " + (
            "was asked for" if self._settings.context_length else "is the minimum unless less is asked for"
        )
        less = f", or ask for less: --context-length {num_tokens}" if num_tokens >= layout.page_size else ""
        if kv.pages is not None or kv.memory is not None:
            given = f"{kv.pages} pages" if kv.pages is not None else kv.memory
            more = f"--kv-pages {self._least_pages}" if kv.pages is not None else f"--kv-memory {_whole_mib(needed)}MiB"
            return NoMemory(
                "the KV pools are too small for the context",
                why=f"{given} hold {holds}, but {least}",
                do=f"give them {more}{less}",
            )
        pools = "a pool" if self._num_workers == 1 else f"each of {self._num_workers} pools"
        total = _whole_mib(int(needed * self._num_workers / _USABLE_SHARE))
        return NoMemory(
            f"{kv.directory} is too small for KV pools",
            why=f"{amount(self._free_bytes)} are free there, and the {amount(self._share_bytes)} that {pools} may take "
            f"hold {holds}; {least}, and takes {amount(needed)}",
            do=f"make it larger (docker: --shm-size={total}m at least), {_OTHER_MEMORY}{less}",
        )

    @property
    def _share_bytes(self) -> int:
        return int(self._free_bytes * _USABLE_SHARE / self._num_workers)

    def _host_pages(self) -> int:
        kv, layout = self._settings.kv, self._layout
        if kv.pages is not None:
            return kv.pages
        if kv.memory is not None:
            num_pages = _pages_in(parse_bytes(kv.memory), layout)
            if num_pages < 2:
                raise BadConfig(
                    f"KV memory of {kv.memory} is too little",
                    why=f"a page of this model takes {amount(layout.page_bytes)}, and a pool needs at least two",
                    do="give more with --kv-memory",
                )
            return num_pages
        # A context length that was given is intended, so it may take more than the default.
        most_bytes = max(_MAX_DEFAULT_POOL_BYTES, _file_bytes("", self._least_pages, layout))
        tokens = max(self._wanted_context * _DEFAULT_CONTEXTS, _MIN_DEFAULT_TOKENS)
        return min(layout.num_pages_for(tokens) + 1, _pages_in(min(self._share_bytes, most_bytes), layout))

    def _pages_on_devices(self, max_batch_tokens: int) -> int:
        """As many as fit on the fullest device: groups on devices are of equal size."""
        settings, layout = self._settings, self._layout
        wanted = settings.kv.pages
        if wanted is None and settings.kv.memory is not None:
            wanted = max(2, parse_bytes(settings.kv.memory) // layout.page_bytes)
        num_workers = Counter(device for group in self._groups for device in group.devices)
        tp_size = self._groups[0].tp_size
        return min(
            device_pages(
                self._devices[name],
                DeviceLoad(self._spec, layout.dtype, max_batch_tokens, count, settings.mem_fraction, tp_size),
                layout,
                wanted,
                self._least_pages,
            )
            for name, count in num_workers.items()
        )


def _file_bytes(group: str, num_pages: int, layout: KVLayout, device: str = CPU) -> int:
    return PoolInfo(group=group, num_pages=num_pages, layout=layout, incarnation=0, device=device).file_bytes


def _pages_in(num_bytes: int, layout: KVLayout) -> int:
    """Pages whose pool takes at most `num_bytes`, tables included."""
    sizes = range(1, num_bytes // layout.page_bytes + 1)
    return bisect_right(sizes, num_bytes, key=lambda num_pages: _file_bytes("", num_pages, layout))


def context_elsewhere(settings: Settings, spec: ModelSpec) -> ServedContext:
    """The context that a host without pools reports; its requests' KV is on other hosts.

    All hosts go by one file: pools are as large as it says, or hold the context that is wanted (`PoolPlan`).
    """
    wanted = _wanted_context(settings, spec)
    # Groups with the fewest ranks have the largest pages.
    phases = zip(("prefill", "decode", "mixed"), settings.mesh_groups, strict=True)
    tp_size = min((settings.tp_size(phase) for phase, count in phases if count), default=1)
    kv, layout = settings.kv, spec.kv_layout(settings.dtype, settings.kv.page_size, 0, tp_size)
    num_pages = kv.pages if kv.memory is None else _pages_in(parse_bytes(kv.memory), layout)
    if num_pages is None:
        # It depends on each host's memory, which is not known here.
        return ServedContext(length=wanted, model_length=spec.context_length)
    kv_tokens = max(0, num_pages - 1) * layout.page_size
    length = min(wanted, kv_tokens)
    more_by = "" if length == wanted else "--kv-memory" if kv.pages is None else "--kv-pages"
    return ServedContext(length=length, model_length=spec.context_length, kv_tokens=kv_tokens, more_by=more_by)


def _wanted_context(settings: Settings, spec: ModelSpec) -> int:
    """What is asked for, or what the model can use: one that makes vectors alone may have a longest input."""
    longest = 0 if spec.has_head or spec.pooling is None else spec.pooling.max_length
    return settings.context_length or min(longest or spec.context_length, spec.context_length)


def _whole_mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
