"""Planted bugs in how a group's memory is released and resumed; see `mutations.py`, whose seeds release nothing.

Left out is what a second guard hides in host memory: a copy from a pool that was freed too early finds it closed, and
orders and answers of an earlier wish come late only over links that end with their sender. Tests of the cores have
those.
"""

from typing import Any

from mesh.actor import Call
from nodes.kv_agent.memory import actions
from nodes.kv_agent.memory.actions import MemoryActions
from nodes.kv_agent.memory.core import MemoryCore
from nodes.kv_agent.pools.held import HeldPools
from nodes.protocol.memory import HasLetGo, LetGo
from nodes.scheduler.actor import SchedulerActor
from nodes.worker.actor import WorkerActor
from tests.simulation.planting import Bug, around, bug, nothing


def _of_held_groups(pending: Any, self: Any, group: Any) -> Any:
    return pending(self, group) if group.wish is None else []


def _of_wanted_groups(pending: Any, self: Any, group: Any) -> Any:
    return pending(self, group) if group.wish is not None else []


def _without_wish(facts: Any, ranks: Any) -> Any:
    return facts(ranks)._replace(wish=None)


def _keep_everything(_: Any, self: SchedulerActor, call: Call, order: LetGo) -> None:
    call.reply(HasLetGo(group=order.group, number=order.number))


def _under_steps(stop_steps: Any, self: WorkerActor, *, is_stopped: bool) -> bool:
    stop_steps(self, is_stopped=is_stopped)
    return False


def _only_rank_0(free_pools: Any, host: Any, prefix: Any, pools: Any) -> Any:
    return [*free_pools(host, prefix, pools[:1]), *pools[1:]]


PLANTED: dict[str, Bug] = {
    "a pool is freed under those who map it": bug(0, around(MemoryCore, "_pending", _of_held_groups)),
    "who let go is not asked to take up": bug(3, around(MemoryCore, "_pending", _of_wanted_groups)),
    "the next agent does not know the wish": bug(17, around(actions, "_facts", _without_wish)),
    "a holder that died is waited for": bug(15, around(MemoryCore, "_forget", nothing)),
    "a scheduler keeps what it is asked to give back": bug(0, around(SchedulerActor, "_let_go", _keep_everything)),
    "a worker releases its memory under a step": bug(27, around(WorkerActor, "stop_steps", _under_steps)),
    "only the first rank's pool is freed": bug(0, around(actions, "free_pools", _only_rank_0)),
    "copies go on from pools that are wanted back": bug(38, around(HeldPools, "stop_copies", nothing)),
    "the wish is not written down": bug(0, around(MemoryActions, "_mark", nothing)),
}
