"""Asks members of the mesh for their statistics, all at once and within one deadline."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from mesh.actor import Context
from mesh.errors import CallError
from mesh.membership.view import Member
from mesh.wire.frames import StatsReply, StatsRequest


class ActorStats(NamedTuple):
    """What one member answered; `stats` is None if it did not."""

    actor_id: str
    role: str
    epoch: int
    stats: StatsReply | None


async def ask_stats(ctx: Context, members: Sequence[Member], timeout_s: float) -> list[ActorStats]:
    """The answers of `members`, of which the asker may be one, in their order."""
    return list(await asyncio.gather(*(_ask(ctx, member, timeout_s) for member in members)))


async def _ask(ctx: Context, member: Member, timeout_s: float) -> ActorStats:
    stats: StatsReply | None = None
    if member.actor_id == ctx.address.actor_id:
        stats = ctx.stats()
    else:
        try:
            answer = await ctx.ask(member.actor_id, StatsRequest(), timeout_s=timeout_s)
        except CallError:
            answer = None
        if answer is not None and isinstance(answer.message, StatsReply):
            stats = answer.message
    return ActorStats(member.actor_id, member.role, member.epoch, stats)
