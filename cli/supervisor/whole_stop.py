"""Stops a mesh of several hosts, tier by tier over all its supervisors.

The registry's host ends after the others, and the host that was asked ends last. A supervisor drains its own host's
actors by tiers; the tiers here are those across hosts. A gateway may still have requests for schedulers of any host, so
all gateways are empty before the first scheduler drains, and what prefills for another host's scheduler goes on until
that scheduler is done.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from cli.protocol import ActorList, ListActors, RestartActors, StopMesh
from cli.supervisor.whole_mesh import ASK_TIMEOUT_S, other_supervisors
from mesh.actor import Context
from mesh.address import host_of
from mesh.errors import CallError
from mesh.supervision.events import DRAINED
from nodes import roles

_TIERS: Final = ((roles.GATEWAY,), (roles.TOKENIZER, roles.SCHEDULER, roles.DETOKENIZER))
"""Workers and agents end with their own host's schedulers."""
_LOOK_S: Final = 0.1


async def stop_whole_mesh(
    ctx: Context, request: StopMesh, registry_host: str, timeout_s: float, left: Callable[[str, float], Awaitable[None]]
) -> None:
    """Drain and end all other hosts; the caller then ends its own. Waits `timeout_s` a tier at most.

    `left` waits until an actor is gone, at most as many seconds as it is given.
    """
    others = [one.actor_id for one in other_supervisors(ctx)]
    if not request.force:
        for tier in _TIERS:
            await _drain([ctx.address.actor_id, *others], ctx, tier, timeout_s)
    last = [one for one in others if host_of(one) == registry_host]
    for some in ([one for one in others if one not in last], last):
        asked = [one for one in some if await _ask(ctx, one, StopMesh(reason=request.reason, force=request.force))]
        # A host that does not answer is cut off or gone: nothing here can end it, and it must not hold up the others.
        await asyncio.gather(*(left(one, timeout_s) for one in asked))


async def _drain(supervisors: Iterable[str], ctx: Context, tier: tuple[str, ...], timeout_s: float) -> None:
    """Have all actors of some roles drain and stay away, on all hosts, and wait for it."""
    waiting = {
        one: names
        for one in supervisors
        if (names := await _undrained(ctx, one, tier))
        and await _ask(ctx, one, RestartActors(names=sorted(names), stay_away=True, here=True))
    }
    deadline = ctx.now() + timeout_s
    while waiting and ctx.now() < deadline:
        await asyncio.sleep(_LOOK_S)
        left = {one: names & await _undrained(ctx, one, tier) for one, names in waiting.items()}
        waiting = {one: names for one, names in left.items() if names}


async def _undrained(ctx: Context, supervisor: str, tier: tuple[str, ...]) -> set[str]:
    answer = await _ask(ctx, supervisor, ListActors())
    actors = answer.actors if isinstance(answer, ActorList) else []
    return {one.actor_id for one in actors if one.supervised and one.role in tier and one.state != DRAINED}


async def _ask(ctx: Context, supervisor: str, question: ListActors | RestartActors | StopMesh) -> object:
    try:
        return (await ctx.ask(supervisor, question, timeout_s=ASK_TIMEOUT_S)).message
    except CallError as error:
        ctx.log.warning("supervisor_unasked", peer=supervisor, question=type(question).__name__, why=error.message)
        return None
