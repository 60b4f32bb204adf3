"""Asks members of the mesh for their statistics, all at once and within one deadline."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh.actor import Context
from mesh.address import Address, host_of
from mesh.errors import CallError
from mesh.membership.view import Member
from mesh.wire.frames import StatsReply, StatsRequest


class ActorStats(NamedTuple):
    """What one member answered; `stats` is None if it did not. `host` is "" on a mesh of one host."""

    actor_id: str
    role: str
    epoch: int
    stats: StatsReply | None
    host: str = ""


def hosts_of(members: Sequence[Member]) -> dict[str, str]:
    """Where each member is, by actor id; empty on a mesh of one host."""
    if not any(host_of(member.actor_id) for member in members):
        return {}
    return {member.actor_id: host_of(member.actor_id) or member.host for member in members}


def silent_hosts(answers: Sequence[ActorStats]) -> list[str]:
    """Hosts from which no member has answered."""
    return sorted({answer.host for answer in answers} - {answer.host for answer in answers if answer.stats is not None})


async def ask_stats(
    ctx: Context, members: Sequence[Member], timeout_s: float, history_after: Mapping[Address, int] | None = None
) -> list[ActorStats]:
    """The answers of `members`, in the same order; the asker may be one of them. With `history_after`, also their
    history: samples later than these numbers, all of an incarnation that is not in it.
    """
    hosts = hosts_of(members)
    asks = (
        _ask(
            ctx,
            member,
            hosts.get(member.actor_id, ""),
            timeout_s,
            None if history_after is None else history_after.get(member.address, 0),
        )
        for member in members
    )
    return list(await asyncio.gather(*asks))


async def _ask(ctx: Context, member: Member, host: str, timeout_s: float, history_after: int | None) -> ActorStats:
    stats: StatsReply | None = None
    if member.actor_id == ctx.address.actor_id:
        stats = ctx.stats(history_after)
    else:
        try:
            answer = await ctx.ask(member.actor_id, StatsRequest(history_after=history_after), timeout_s=timeout_s)
        except CallError:
            answer = None
        if answer is not None and isinstance(answer.message, StatsReply):
            stats = answer.message
    return ActorStats(member.actor_id, member.role, member.epoch, stats, host)
