"""What a host that ends may still have to do for others: its tokenizers and detokenizers may be the last of the mesh.

Schedulers know what they have taken, and a gateway its calls, but a tokenizer or detokenizer cannot know who will come
to it next. So these stay until no gateway has a call any more, or actors of a host that goes on can take their places.
All hosts may be told to end at once, in any order: each says that it ends before it asks the others, so that of two
that end at the same time at least one waits.
"""

import asyncio
from collections.abc import Collection
from typing import Final

from cli.protocol import ActorList, ListActors
from cli.supervisor.hosts.whole_mesh import ASK_TIMEOUT_S, ask_each, other_supervisors
from mesh.actor import Context
from mesh.membership.view import READY
from nodes.actor_figures import CALLS_IN_FLIGHT
from nodes.roles import DETOKENIZER, GATEWAY, TOKENIZER
from nodes.stats import ask_stats

SHARED: Final = (TOKENIZER, DETOKENIZER)
_LOOK_S: Final = 0.2
"""A look is an ask to each gateway and supervisor; a stop waits at most so much too long."""


async def until_others_are_done(ctx: Context, roles: Collection[str]) -> None:
    """Return when nobody needs a host's actors of these roles any more; the host has said that it ends."""
    shared = {*SHARED}.intersection(roles)
    while True:
        if not await _are_needed(ctx, shared):
            return
        await asyncio.sleep(_LOOK_S)


async def _are_needed(ctx: Context, roles: Collection[str]) -> bool:
    gateways = ctx.members.by_role(GATEWAY, ready=False)
    answers = await ask_stats(ctx, gateways, ASK_TIMEOUT_S)
    if not any(answer.stats is not None and answer.stats.gauges.get(CALLS_IN_FLIGHT) for answer in answers):
        return False
    supervisors = [peer.actor_id for peer in other_supervisors(ctx)]
    lists = await ask_each(ctx, dict.fromkeys(supervisors, ListActors()), ActorList, ctx.log.debug)
    stay = [actor for one in lists.values() if not one.ends for actor in one.actors]
    there = {actor.role for actor in stay if actor.supervised and actor.state == READY}
    return not there.issuperset(roles)
