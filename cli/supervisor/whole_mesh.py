"""The whole of a mesh of several hosts, as one of its supervisors sees it: what it asks the others, and what they say.

    meshctl --ask, ipc--> supervisor.a --ask, 2 s--> supervisor.b, supervisor.c

Each speaks for its own host's actors. A host that does not answer is named, and its actors are listed as `unknown`.
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from cli.protocol import ActorList, ListActors
from mesh.actor import Context
from mesh.address import host_of
from mesh.errors import CallError
from mesh.membership.view import SUPERVISOR, Member

UNKNOWN: Final = "unknown"
"""State of an actor whose host does not answer: what the registry has said about it may be long out of date."""

ASK_TIMEOUT_S: Final = 2.0
"""A supervisor answers in milliseconds, or in a second if it asks a hung actor for figures."""


def other_supervisors(ctx: Context) -> list[Member]:
    """Supervisors of other hosts that are members now, sorted by their ids."""
    return [one for one in ctx.members.by_role(SUPERVISOR, ready=False) if one.actor_id != ctx.address.actor_id]


async def list_whole_mesh(ctx: Context, own: ActorList, hosts: Collection[str], *, figures: bool) -> ActorList:
    """`own` with what the supervisors of other hosts say; `hosts` are those that the topology names."""
    others = other_supervisors(ctx)
    answers = await asyncio.gather(*(_ask(ctx, one.actor_id, ListActors(figures=figures)) for one in others))
    said = {host_of(one.actor_id): answer for one, answer in zip(others, answers, strict=True)}
    missing: dict[str, ActorList | None] = {host: None for host in hosts if host not in said}
    missing.pop(host_of(ctx.address.actor_id), None)
    return joined(own, said | missing, set(missing))


def joined(own: ActorList, said: Mapping[str, ActorList | None], absent: Collection[str]) -> ActorList:
    """One list of all hosts' lists, in the order of their names; `absent` hosts are not in the mesh at all."""
    answers = [answer for _, answer in sorted(said.items()) if answer is not None]
    actors = [one for answer in (own, *answers) for one in answer.actors if one.supervised]
    known = {one.actor_id for one in actors}
    silent = sorted(host for host, answer in said.items() if answer is None)
    strangers = [
        msgspec.structs.replace(one, state=UNKNOWN) if one.host in silent else one
        for one in own.actors
        if one.actor_id not in known
    ]
    notes = [
        f"host {host} {'is not in the mesh' if host in absent else f'does not answer within {ASK_TIMEOUT_S:g} s'}"
        for host in silent
    ]
    told = dict.fromkeys(note for answer in (own, *answers) for note in answer.notes)
    return msgspec.structs.replace(
        own,
        ready=not notes and all(answer.ready for answer in (own, *answers)),
        actors=[*actors, *strangers],
        notes=[*notes, *told],
        silent=silent,
    )


async def _ask(ctx: Context, supervisor: str, question: ListActors) -> ActorList | None:
    try:
        answer = await ctx.ask(supervisor, question, timeout_s=ASK_TIMEOUT_S)
    except CallError:
        return None
    return answer.message if isinstance(answer.message, ActorList) else None
