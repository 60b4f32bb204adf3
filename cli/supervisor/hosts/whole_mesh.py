"""The whole of a mesh of several hosts, as one of its supervisors sees it: what it asks the others, and what they say.

    meshctl --ask, ipc--> supervisor.a --ask, 2 s--> supervisor.b, supervisor.c

Each speaks for its own host's actors. A host that does not answer is named, and its actors are listed as `unknown`.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

import msgspec

from cli.protocol import ActorList, ListActors
from mesh.actor import Context
from mesh.address import host_of
from mesh.errors import CallError, RemoteError
from mesh.membership.view import SUPERVISOR, Member
from mesh.wire.message import Message

UNKNOWN: Final = "unknown"
"""State of an actor whose host does not answer: what the registry has said about it may be long out of date."""

ASK_TIMEOUT_S: Final = 2.0
"""A supervisor answers in milliseconds, or in a second if it asks a hung actor for figures."""

_CLOCKS_APART_S: Final = 1.0
"""Clocks kept by NTP differ by milliseconds; people who compare the logs of two hosts notice a second."""

Said = TypeVar("Said", bound=Message)


def other_supervisors(ctx: Context) -> list[Member]:
    """The supervisors of the mesh's other hosts, whether they are ready or not."""
    return [peer for peer in ctx.members.by_role(SUPERVISOR, ready=False) if peer.actor_id != ctx.address.actor_id]


def is_own(ctx: Context, member: Member) -> bool:
    """Whether a member is of the asker's own host. On a mesh of one host all are, whatever they call the machine."""
    own = host_of(ctx.address.actor_id)
    return not own or home_of(member) == own


def home_of(member: Member) -> str:
    """The host of a member of a mesh of several: an id names it, except for actors that were started by hand."""
    return host_of(member.actor_id) or member.host


async def ask(ctx: Context, actor_id: str, question: Message, kind: type[Said]) -> Said:
    """What an actor answers within 2 s. Raises CallError, also for an answer of another kind."""
    answer = (await ctx.ask(actor_id, question, timeout_s=ASK_TIMEOUT_S)).message
    if not isinstance(answer, kind):
        raise RemoteError("bad_answer", f"{actor_id} answers {type(question).__name__} with {type(answer).__name__}")
    return answer


async def ask_each(
    ctx: Context, questions: Mapping[str, Message], kind: type[Said], log: Callable[..., object]
) -> dict[str, Said]:
    """What those actors answer, all asked at once. Those that do not are only logged."""
    said: dict[str, Said] = {}

    async def add_answer(actor_id: str, question: Message) -> None:
        try:
            said[actor_id] = await ask(ctx, actor_id, question, kind)
        except CallError as error:
            log("supervisor_unasked", peer=actor_id, question=type(question).__name__, why=error.message)

    await asyncio.gather(*(add_answer(*each) for each in questions.items()))
    return said


async def ask_all(
    ctx: Context, actor_ids: Collection[str], question: Message, kind: type[Said]
) -> tuple[list[Said], list[str]]:
    """What those actors answer to one question, in their order, and the ids of those that do not."""
    said = await ask_each(ctx, dict.fromkeys(actor_ids, question), kind, ctx.log.debug)
    return [said[one] for one in actor_ids if one in said], sorted({*actor_ids} - said.keys())


async def list_whole_mesh(ctx: Context, own: ActorList, hosts: Collection[str], question: ListActors) -> ActorList:
    """`own` with what the supervisors of other hosts say to it; `hosts` are those that the topology names."""
    others = [peer.actor_id for peer in other_supervisors(ctx)]
    of_one = msgspec.structs.replace(question, whole_mesh=False)
    began_at = time.time()
    said = await ask_each(ctx, dict.fromkeys(others, of_one), ActorList, ctx.log.debug)
    apart = clock_notes({host_of(peer): answer.at for peer, answer in said.items()}, began_at, time.time())
    silent = dict.fromkeys({*hosts} - {host_of(peer) for peer in (ctx.address.actor_id, *others)}, "is not in the mesh")
    silent |= {host_of(peer): f"does not answer within {ASK_TIMEOUT_S:g} s" for peer in others if peer not in said}
    own = msgspec.structs.replace(own, notes=[*apart, *own.notes])
    return joined([own, *(said[peer] for peer in others if peer in said)], silent)


def clock_notes(told: Mapping[str, float], began_at: float, ended_at: float) -> list[str]:
    """Whose clocks are a second or more from this one; what each told is Unix time between these two moments."""
    notes: list[str] = []
    for host, at in sorted(told.items()):
        # An older release tells none.
        apart_s = max(at - ended_at, 0.0) or min(at - began_at, 0.0) if at else 0.0
        if abs(apart_s) >= _CLOCKS_APART_S:
            which = "ahead of" if apart_s > 0 else "behind"
            text = f"the clock of host {host} is {abs(apart_s):,.0f} s {which} this one's: set them by NTP; until then"
            notes.append(f"{text} lines of `meshctl logs` are out of order")
    return notes


def joined(answers: list[ActorList], silent: Mapping[str, str]) -> ActorList:
    """One list of all hosts' lists, the asked host's own first; `silent` says of the other hosts what is the matter."""
    own = answers[0]
    actors = [actor for answer in answers for actor in answer.actors if actor.supervised]
    known = {actor.actor_id for actor in actors}
    strangers = [
        msgspec.structs.replace(actor, state=UNKNOWN) if actor.host in silent else actor
        for actor in own.actors
        if actor.actor_id not in known
    ]
    told = dict.fromkeys(note for answer in answers for note in answer.notes)
    return msgspec.structs.replace(
        own,
        ready=not silent and all(answer.ready for answer in answers),
        actors=[*actors, *strangers],
        notes=[*(f"host {host} {silent[host]}" for host in sorted(silent)), *told],
        silent=sorted(silent),
    )
