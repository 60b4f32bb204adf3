"""What `meshctl kv` asks goes to the agents of all hosts, and what they say comes back as one answer."""

import asyncio
from typing import Any

import pytest

from cli.supervisor.hosts.store_relay import find_fates, flush_stores, list_stores
from cli.supervisor.told.refusals import NoAgent, UnknownStore
from mesh.address import Address, Endpoint
from mesh.errors import DeadlineExceeded, RemoteError
from mesh.membership.view import Member
from mesh.wire.frames import StatsReply, StatsRequest
from nodes.protocol.stores import (
    AgentStores,
    FatesFound,
    FindFates,
    FlushedStore,
    FlushStores,
    ListStores,
    PromptFate,
    StoreFacts,
    StoreList,
    StoresFlushed,
)
from tests.nodes.recording_context import RecordingContext

RATES = {
    "mesh_scheduler_store_queried_pages_total": 9.0,
    "mesh_scheduler_restored_pages_per_second": 1200.5,
    'mesh_scheduler_restores_total{outcome="dearer"}': 2.0,
}


def member(actor_id: str, role: str) -> Member:
    return Member(actor_id=actor_id, epoch=1, role=role, host=actor_id[-1], endpoint=Endpoint("c", "d"), state="ready")


MEMBERS = [
    member("kv-agent-0.b", "kv_agent"), member("kv-agent-0.a", "kv_agent"),
    member("scheduler-d.a", "scheduler"), member("scheduler-p.b", "scheduler"),
]  # fmt: skip


def kept(agent: str, *folders: str) -> StoreList:
    stores = [StoreFacts(folder=folder, is_open=not folder.endswith("closed")) for folder in folders]
    return StoreList(agents=[AgentStores(agent=agent, directory="/kv", size_bytes=1, stores=stores)])


def flushed(agent: str, *folders: str) -> StoresFlushed:
    return StoresFlushed(flushed=[FlushedStore(agent=agent, folder=folder, num_pages=3) for folder in folders])


def world(answers: dict[tuple[str, type], Any]) -> RecordingContext:
    async def answer(actor_id: str, message: Any) -> Any:
        found = answers.get((actor_id, type(message)), DeadlineExceeded("no answer"))
        if isinstance(found, Exception):
            raise found
        return found

    return RecordingContext(Address("supervisor.a", 1), answer, MEMBERS)


def test_stores_and_rates_of_all_hosts_are_one_list() -> None:
    ctx = world(
        {
            ("kv-agent-0.a", ListStores): kept("kv-agent-0.a", "kv-1"),
            ("kv-agent-0.b", ListStores): kept("kv-agent-0.b", "kv-1", "kv-closed"),
            ("scheduler-d.a", StatsRequest): StatsReply(counters={}, gauges=RATES, histograms={}),
            ("scheduler-p.b", StatsRequest): StatsReply(counters={}, gauges={}, histograms={}),
        }
    )
    found = asyncio.run(list_stores(ctx))  # type: ignore[arg-type]
    assert [(one.agent, len(one.stores)) for one in found.agents] == [("kv-agent-0.a", 1), ("kv-agent-0.b", 2)]
    (reader,) = found.readers
    assert (reader.scheduler, reader.pages_per_s, reader.tokens_per_s) == ("scheduler-d.a", 1200.5, 0.0)
    assert (reader.num_queried, reader.num_found, reader.num_dearer) == (9, 0, 2)
    assert found.silent == []


def test_a_mesh_without_agents_is_asked_again() -> None:
    ctx = RecordingContext(Address("supervisor.a", 1), None, MEMBERS[2:])
    for asking in (list_stores(ctx), flush_stores(ctx, FlushStores(), "")):  # type: ignore[arg-type]
        with pytest.raises(NoAgent) as refused:
            asyncio.run(asking)
        assert refused.value.retryable


def test_who_does_not_answer_is_named() -> None:
    found = asyncio.run(list_stores(world({("kv-agent-0.a", ListStores): kept("kv-agent-0.a")})))  # type: ignore[arg-type]
    assert [one.agent for one in found.agents] == ["kv-agent-0.a"]
    assert found.silent == ["kv-agent-0.b", "scheduler-d.a", "scheduler-p.b"]


def test_what_became_of_prompts_is_in_the_order_of_the_requests() -> None:
    def fate(request_id: str, *, is_order: bool = False) -> PromptFate:
        return PromptFate(request_id=request_id, attempt=0, scheduler="s", is_order=is_order)

    ctx = world(
        {("scheduler-d.a", FindFates): FatesFound(fates=[fate("two"), fate("one", is_order=True), fate("one")])}
    )
    found = asyncio.run(find_fates(ctx, FindFates(request_ids=["one", "two"])))  # type: ignore[arg-type]
    assert [(one.request_id, one.is_order) for one in found.fates] == [("one", False), ("one", True), ("two", False)]
    assert found.silent == ["scheduler-p.b"]


BOTH = {
    ("kv-agent-0.a", ListStores): kept("kv-agent-0.a", "kv-1"),
    ("kv-agent-0.b", ListStores): kept("kv-agent-0.b", "kv-2", "kv-closed"),
    ("kv-agent-0.a", FlushStores): flushed("kv-agent-0.a", "kv-1"),
    ("kv-agent-0.b", FlushStores): flushed("kv-agent-0.b", "kv-2"),
}


def test_a_flush_is_for_all_agents() -> None:
    ctx = world(BOTH)
    answer = asyncio.run(flush_stores(ctx, FlushStores(), "host c is away"))  # type: ignore[arg-type]
    assert {one.agent: one.folder for one in answer.flushed} == {"kv-agent-0.a": "kv-1", "kv-agent-0.b": "kv-2"}
    assert answer.note == "host c is away"
    asyncio.run(flush_stores(ctx, FlushStores(folders=["kv-2"]), ""))  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["kv-3", "kv-closed"])
def test_a_store_that_nobody_has_open_is_refused_before_anything_is_forgotten(folder: str) -> None:
    ctx = world(BOTH)
    with pytest.raises(UnknownStore, match=f"no open store {folder}") as refused:
        asyncio.run(flush_stores(ctx, FlushStores(folders=["kv-1", folder]), "host c is away"))  # type: ignore[arg-type]
    assert "host c is away" in refused.value.message
    assert not any(isinstance(message, FlushStores) for _, message in ctx.asked)


def test_an_agent_that_fails_is_named() -> None:
    loading = RemoteError("store_loading", "it is being read", retryable=True)
    with pytest.raises(RemoteError, match=r"kv-agent-0\.b: .*being read") as failed:
        asyncio.run(flush_stores(world({**BOTH, ("kv-agent-0.b", FlushStores): loading}), FlushStores(), ""))  # type: ignore[arg-type]
    assert (failed.value.code, failed.value.retryable) == ("store_loading", True)
    with pytest.raises(RemoteError, match="answers FlushStores with StoreList"):
        asyncio.run(flush_stores(world({**BOTH, ("kv-agent-0.b", FlushStores): kept("x")}), FlushStores(), ""))  # type: ignore[arg-type]
