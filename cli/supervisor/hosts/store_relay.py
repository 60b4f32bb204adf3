"""Passes what `meshctl kv` asks on to the kv_agents and schedulers of all hosts, and joins their answers."""

import asyncio
from typing import Final

from cli.plan.faults import unknown_name
from cli.supervisor.hosts.whole_mesh import ask_all
from cli.supervisor.told.refusals import NoAgent, UnknownStore
from mesh.actor import Context
from mesh.errors import CallError, RemoteError
from nodes.protocol.stores import (
    FatesFound,
    FindFates,
    FlushedStore,
    FlushStores,
    ListStores,
    StoreList,
    StoreReader,
    StoresFlushed,
)
from nodes.roles import KV_AGENT, SCHEDULER
from nodes.stats import ActorStats, ask_stats

FLUSH_S: Final = 20.0
"""Heads of a million pages are 64 MB, behind the pages that are being written (256 MiB): seconds on a slow disk."""
_STATS_S: Final = 1.0
"""A scheduler that hangs is left out of the list."""
_FIGURES: Final = {
    "pages_per_s": "mesh_scheduler_restored_pages_per_second",
    "tokens_per_s": "mesh_scheduler_prefilled_tokens_per_second",
    "num_queried": "mesh_scheduler_store_queried_pages_total",
    "num_found": "mesh_scheduler_store_found_pages_total",
    "num_restored": "mesh_scheduler_restored_pages_total",
    "num_done": 'mesh_scheduler_restores_total{outcome="done"}',
    "num_failed": 'mesh_scheduler_restores_total{outcome="failed"}',
    "num_dearer": 'mesh_scheduler_restores_total{outcome="dearer"}',
}
"""What a `StoreReader` has, and where it comes from."""


async def list_stores(ctx: Context) -> StoreList:
    """The stores of all agents, and what schedulers read from them. Who does not answer is in `silent`.

    Raises NoAgent.
    """
    agents = _agents(ctx)
    schedulers = ctx.members.by_role(SCHEDULER)
    asked = ask_all(ctx, agents, ListStores(), StoreList)
    (said, silent), stats = await asyncio.gather(asked, ask_stats(ctx, schedulers, _STATS_S))
    return StoreList(
        agents=sorted((one for answer in said for one in answer.agents), key=lambda one: one.agent),
        readers=[reader for answer in stats if (reader := _reader(answer)) is not None],
        silent=sorted({*silent, *(answer.actor_id for answer in stats if answer.stats is None)}),
    )


async def find_fates(ctx: Context, query: FindFates) -> FatesFound:
    """What became of prompts' pages, as all schedulers remember it: those that decode before those that prefill."""
    schedulers = [member.actor_id for member in ctx.members.by_role(SCHEDULER, ready=False)]
    said, silent = await ask_all(ctx, schedulers, query, FatesFound)
    order = {request_id: number for number, request_id in enumerate(query.request_ids)}
    fates = sorted(
        (fate for answer in said for fate in answer.fates),
        key=lambda fate: (order.get(fate.request_id, 0), fate.attempt, fate.is_order),
    )
    return FatesFound(fates=fates, silent=silent)


async def flush_stores(ctx: Context, wish: FlushStores, absent: str) -> StoresFlushed:
    """Have all agents forget the pages of the stores that are meant.

    `absent` says which hosts cannot be asked. Raises NoAgent, UnknownStore, if no agent has one open, and RemoteError
    as the first agent that fails says; others have forgotten theirs all the same.
    """
    agents = _agents(ctx)
    if wish.folders:
        said, _ = await ask_all(ctx, agents, ListStores(), StoreList)
        kept = (one for answer in said for agent in answer.agents for one in agent.stores)
        known = {store.folder for store in kept if store.is_open}
        for folder in wish.folders:
            if folder not in known:
                fault = unknown_name(folder, known, "open store")
                raise UnknownStore("; ".join(filter(None, (fault.why, absent, fault.do))))
    answers = await asyncio.gather(*(_flush(ctx, agent, wish) for agent in agents), return_exceptions=True)
    flushed: list[FlushedStore] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        flushed += answer.flushed
    return StoresFlushed(flushed=flushed, note=absent)


async def _flush(ctx: Context, agent: str, wish: FlushStores) -> StoresFlushed:
    try:
        answer = (await ctx.ask(agent, wish, timeout_s=FLUSH_S)).message
    except CallError as error:
        raise RemoteError(error.code, f"{agent}: {error.message}", error.retryable) from error
    if not isinstance(answer, StoresFlushed):
        raise RemoteError("bad_answer", f"{agent} answers FlushStores with {type(answer).__name__}")
    return answer


def _agents(ctx: Context) -> list[str]:
    agents = [member.actor_id for member in ctx.members.by_role(KV_AGENT, ready=False)]
    if not agents:
        # A supervisor hears of the first members a moment after it has begun to answer.
        raise NoAgent("no kv_agent is in the mesh yet; try again in a moment")
    return agents


def _reader(answer: ActorStats) -> StoreReader | None:
    """Nothing of a scheduler that does not read from a store."""
    if answer.stats is None:
        return None
    series = {**answer.stats.counters, **answer.stats.gauges}
    if _FIGURES["num_queried"] not in series:
        return None
    found = {name: series.get(source, 0.0) for name, source in _FIGURES.items()}
    rates = {name: value for name, value in found.items() if name.endswith("_per_s")}
    counts = {name: int(value) for name, value in found.items() if name not in rates}
    return StoreReader(scheduler=answer.actor_id, **rates, **counts)
