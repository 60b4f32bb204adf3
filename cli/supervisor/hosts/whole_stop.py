"""Stops a mesh of several hosts, tier by tier over all its supervisors.

The registry's host ends after the others, and the host that was asked ends last. A supervisor drains its own host's
actors by tiers; the tiers here are those across hosts. A gateway may still have requests for schedulers of any host, so
all gateways are empty before the first scheduler drains, and what prefills for another host's scheduler goes on until
that scheduler is done.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from cli.plan.names import supervisor_id
from cli.protocol import ActorList, ListActors, RestartActors, Restarting, StopMesh, Stopping
from cli.supervisor.hosts.whole_mesh import ask_each, other_supervisors
from mesh.actor import Context
from mesh.supervision.events import DRAINED
from nodes import roles

_TIERS: Final = ((roles.GATEWAY,), (roles.TOKENIZER, roles.SCHEDULER, roles.DETOKENIZER))
"""Workers and agents end with their own host's schedulers."""
_LOOK_S: Final = 0.1
"""A stop takes about a second and looks between its tiers and hosts, at four points; a look is a millisecond a host."""


async def stop_whole_mesh(
    ctx: Context, request: StopMesh, registry_host: str, timeout_s: float, is_there: Callable[[str], bool]
) -> None:
    """Drain and end all other hosts; the caller then ends its own. Waits `timeout_s` a tier at most.

    `is_there` says whether a supervisor is still a member, as far as is known.
    """
    others = [peer.actor_id for peer in other_supervisors(ctx)]
    for tier in () if request.force else _TIERS:
        await _drain(ctx, [ctx.address.actor_id, *others], tier, timeout_s)
    last = {supervisor_id(registry_host)} & {*others}
    for some in ([peer for peer in others if peer not in last], last):
        stop = StopMesh(reason=request.reason, force=request.force)
        # A host that does not answer is cut off or gone: nothing here can end it, and it must not hold up the others.
        left: Iterable[str] = await ask_each(ctx, dict.fromkeys(some, stop), Stopping, ctx.log.warning)
        deadline = ctx.now() + timeout_s
        while left and ctx.now() < deadline:
            await asyncio.sleep(_LOOK_S)
            left = [peer for peer in left if is_there(peer)]


async def _drain(ctx: Context, supervisors: Iterable[str], tier: tuple[str, ...], timeout_s: float) -> None:
    waiting = await _undrained(ctx, supervisors, tier)
    drains = {peer: RestartActors(names=names, stay_away=True, here=True) for peer, names in waiting.items()}
    asked: Iterable[str] = await ask_each(ctx, drains, Restarting, ctx.log.warning)
    deadline = ctx.now() + timeout_s
    while asked and ctx.now() < deadline:
        await asyncio.sleep(_LOOK_S)
        asked = await _undrained(ctx, asked, tier)


async def _undrained(ctx: Context, supervisors: Iterable[str], tier: tuple[str, ...]) -> dict[str, list[str]]:
    """Ids of such actors that are not drained, by their supervisors; without those that have none or do not answer."""
    lists = await ask_each(ctx, dict.fromkeys(supervisors, ListActors()), ActorList, ctx.log.warning)
    found: dict[str, list[str]] = {}
    for supervisor, there in lists.items():
        for actor in there.actors:
            if actor.supervised and actor.role in tier and actor.state != DRAINED:
                found.setdefault(supervisor, []).append(actor.actor_id)
    return found
