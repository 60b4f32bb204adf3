"""Finds calls of clients for `meshctl trace`: at the gateways of this host and in its request logs, or of all hosts.

meshctl --FindCalls--> supervisor.a --FindCalls--> gateways of a;  --FindCalls, 2 s--> supervisors of other hosts
"""

import asyncio
from pathlib import Path

import msgspec

from cli.supervisor.hosts.whole_mesh import ask_all, is_own, other_supervisors
from cli.trace.lines import newest, read_calls
from cli.trace.notes import read_notes
from mesh.actor import Context
from nodes.protocol.records import ActorNotes, CallsFound, FindCalls, FindNotes, NotesFound
from nodes.roles import GATEWAY


async def find_calls(ctx: Context, query: FindCalls, requests: Path) -> CallsFound:
    """What this host knows, or with `whole_mesh` what all do. Who does not answer is named in `silent`."""
    here = [member for member in ctx.members.by_role(GATEWAY, ready=False) if is_own(ctx, member)]
    of_host = msgspec.structs.replace(query, whole_mesh=False)
    # Gateways that are not ready have calls as well: one that drains has those that somebody waits for.
    asked = [peer.actor_id for peer in (*here, *(other_supervisors(ctx) if query.whole_mesh else ()))]
    # In a thread: two files of 16 MiB take longer to be searched than heartbeats can wait.
    lines = asyncio.to_thread(read_calls, requests, query)
    (said, silent), from_lines = await asyncio.gather(ask_all(ctx, asked, of_host, CallsFound), lines)
    told = [call for answer in said for call in answer.calls]
    # A call that has ended is at its gateway and in its file: counted once.
    known = {call.request_id for call in told}
    return CallsFound(
        calls=newest([*told, *from_lines], query),
        num=sum(answer.num for answer in said) + sum(call.request_id not in known for call in from_lines),
        ended={name: num for answer in said for name, num in answer.ended.items()},
        silent=sorted({*silent}.union(*(answer.silent for answer in said))),
    )


async def find_notes(ctx: Context, query: FindNotes, traces: Path) -> NotesFound:
    """What actors of this host, living and dead, noted of some requests, or with `whole_mesh` those of all hosts."""
    of_host = msgspec.structs.replace(query, whole_mesh=False)
    peers = [peer.actor_id for peer in other_supervisors(ctx)] if query.whole_mesh else []
    # In a thread: 80 rings are 64 MB to look through.
    here = asyncio.to_thread(read_notes, traces, query.request_ids, ctx.describe().host)
    (said, silent), own = await asyncio.gather(ask_all(ctx, peers, of_host, NotesFound), here)
    actors: list[ActorNotes] = [*own, *(actor for answer in said for actor in answer.actors)]
    return NotesFound(actors=actors, silent=silent)
