"""What a supervisor answers to `meshctl trace`: of its gateways, of its files, of other hosts; and who is silent."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from cli.supervisor.hosts.call_finder import find_calls, find_notes
from mesh.address import Address, Endpoint
from mesh.errors import DeadlineExceeded
from mesh.membership.view import Member
from mesh.runtime.trace_ring import map_ring
from nodes.protocol.records import CallRecord, CallsFound, FindCalls, FindNotes, NotesFound
from nodes.trace_notes import Noted
from tests.nodes.recording_context import RecordingContext


def member(actor_id: str, role: str) -> Member:
    return Member(actor_id=actor_id, epoch=1, role=role, host=actor_id[-1], endpoint=Endpoint("c", "d"))


MEMBERS = [
    member("gateway-0.a", "gateway"), member("gateway-1.a", "gateway"), member("gateway-0.b", "gateway"),
    member("supervisor.b", "supervisor"), member("supervisor.c", "supervisor"),
]  # fmt: skip


def call(request_id: str, at: float, **fields: Any) -> CallRecord:
    return CallRecord(request_id=request_id, at=at, total_s=1.0, **fields)


def world(answers: dict[str, Any]) -> RecordingContext:
    async def answer(actor_id: str, _: Any) -> Any:
        if actor_id not in answers:
            raise DeadlineExceeded("no answer")
        return answers[actor_id]

    return RecordingContext(Address("supervisor.a", 1), answer, MEMBERS)


def test_calls_of_own_gateways_of_files_and_of_other_hosts(tmp_path: Path) -> None:
    # Of a gateway that is gone, and the line of a call of which its gateway knows more.
    lines = [call("gone", 1.0), call("here", 3.0, sampled=4)]
    (tmp_path / "gateway-0.a.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    ctx = world(
        {
            "gateway-0.a": CallsFound(calls=[call("here", 3.0)], num=1, ended={"gateway-0.a.1": 7}),
            "supervisor.b": CallsFound(calls=[call("there", 2.0)], num=1, silent=["gateway-9.b"]),
        }
    )
    found = asyncio.run(find_calls(ctx, FindCalls(last=5, whole_mesh=True), tmp_path))  # type: ignore[arg-type]
    assert [(one.request_id, one.sampled) for one in found.calls] == [("gone", 1), ("there", 1), ("here", 1)]
    assert (found.num, found.ended) == (3, {"gateway-0.a.1": 7})
    assert found.silent == ["gateway-1.a", "gateway-9.b", "supervisor.c"]
    # Each host answers for itself, so nobody is asked for the whole mesh again, and no other host's gateway.
    assert {actor_id for actor_id, _ in ctx.asked} == {"gateway-0.a", "gateway-1.a", "supervisor.b", "supervisor.c"}
    assert not any(query.whole_mesh for _, query in ctx.asked)


def test_one_host_is_asked_for_itself_alone(tmp_path: Path) -> None:
    ctx = world({"gateway-0.a": CallsFound(calls=[])})
    asyncio.run(find_calls(ctx, FindCalls(name="x"), tmp_path))  # type: ignore[arg-type]
    assert {actor_id for actor_id, _ in ctx.asked} == {"gateway-0.a", "gateway-1.a"}


def test_notes_of_living_and_dead_actors_of_all_hosts(tmp_path: Path) -> None:
    map_ring(tmp_path, Address("scheduler-0.a", 3), lambda: 5.0).note(Noted.LEFT, "c-0", 7)
    ctx = world({"supervisor.b": NotesFound(actors=[])})
    ctx.describe = lambda: member("supervisor.a", "supervisor")  # type: ignore[attr-defined]
    query = FindNotes(request_ids=["c-0"], whole_mesh=True)
    found = asyncio.run(find_notes(ctx, query, tmp_path))  # type: ignore[arg-type]
    (actor,) = found.actors
    assert (actor.actor_id, actor.epoch, actor.host, actor.notes[0].text) == (
        "scheduler-0.a", 3, "a", "leaves, with 7 tokens",
    )  # fmt: skip
    assert found.silent == ["supervisor.c"]
