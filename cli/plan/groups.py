"""Which worker groups there are, how many ranks each has, and which device each rank computes on. Pure.

Ranks are dealt out to the devices in order, group by group: with two devices, a prefill and a decode group of one rank
each get a device of their own. Used by `cli/plan/topology.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cli.errors import BadConfig
from cli.plan.names import on_host
from cli.plan.settings import Settings
from kvstore.layout import KVLayout
from kvstore.pool.device import CPU
from nodes.model_spec import ModelError, ModelSpec
from nodes.scheduler.config import Phase


class WorkerGroup(NamedTuple):
    """One group. `devices` are those of its tensor-parallel ranks, by rank."""

    phase: Phase
    name: str
    devices: tuple[str, ...]
    layouts: tuple[KVLayout, ...]

    @property
    def tp_size(self) -> int:
        return len(self.devices)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(f"worker-{self.name}.{rank}" if rank else f"worker-{self.name}" for rank in range(self.tp_size))


def plan_groups(settings: Settings, spec: ModelSpec, devices: Sequence[str]) -> list[WorkerGroup]:
    """The groups that the settings ask for on this host, on these devices (none: on the CPU). Raises BadConfig."""
    phases: tuple[Phase, ...] = ("prefill", "decode", "mixed")
    wanted: list[tuple[Phase, str, int]] = [
        (phase, on_host(f"{phase}-{number}", settings.on), settings.tp_size(phase))
        for phase, count in zip(phases, settings.groups, strict=True)
        for number in range(count)
    ]
    if not wanted and settings.on:
        return []
    if not wanted:
        raise BadConfig(
            "there is no worker group", why="prefill, decode and mixed are all 0", do="give --mixed 1, for example"
        )
    _check_sizes([size for _, _, size in wanted], spec, devices)
    groups: list[WorkerGroup] = []
    num_dealt = 0
    for phase, name, tp_size in wanted:
        dealt = [devices[(num_dealt + rank) % len(devices)] if devices else CPU for rank in range(tp_size)]
        num_dealt += tp_size
        groups.append(WorkerGroup(phase, name, tuple(dealt), _layouts(settings, spec, tp_size)))
    return groups


def _layouts(settings: Settings, spec: ModelSpec, tp_size: int) -> tuple[KVLayout, ...]:
    try:
        return tuple(spec.kv_layout(settings.dtype, settings.kv.page_size, rank, tp_size) for rank in range(tp_size))
    except ModelError as error:
        raise BadConfig(f"--tp {tp_size} cannot be used", why=error.message, do="give one of those sizes") from error


def _check_sizes(sizes: list[int], spec: ModelSpec, devices: Sequence[str]) -> None:
    if not devices:
        return
    most = max(sizes)
    if most > len(devices):
        raise BadConfig(
            f"a group of {most} ranks cannot be put on {', '.join(devices)}",
            why="each rank of a group needs a device of its own, or NCCL does not connect them",
            do=f"name {most} devices with --device cuda:0,cuda:1,..., or give a smaller --tp",
        )
    if len(set(sizes)) > 1:
        raise BadConfig(
            f"groups of {' and '.join(map(str, sorted(set(sizes))))} ranks cannot exchange pages of {spec.name}",
            why="between devices pages are copied whole, and unequal groups cut them differently",
            do="give all groups the same --tp, or use --device cpu",
        )
