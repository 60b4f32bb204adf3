"""Routes by which trainers steer a mesh: who may, what they do, what they say; and what is not there yet."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.actor import Actor, Call
from mesh.address import Endpoint
from mesh.membership.view import SUPERVISOR, Member
from mesh.wire.frames import StatsReply
from nodes.gateway.control.info import server_info, tokens_of
from nodes.gateway.control.load import Load
from nodes.gateway.control.memory import groups_to_resume, wish_to_release
from nodes.gateway.control.pages import NOT_YET
from nodes.protocol import AttemptsCancelled, CacheFlushed, CancelAttempts, FlushCache
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import GATEWAY, NODE_CODEC, SCHEDULER, WORKER
from nodes.stats import ActorStats
from tests.mesh.mesh_under_test import until
from tests.nodes.gateway.fake_ring import CONFIG, Ring, play
from tests.nodes.gateway.test_api_keys import CONTROLLED, write_keys

ADMIN, ALICE = {"authorization": "Bearer sk-ops"}, {"authorization": "Bearer sk-alice"}
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class Supervisor(Actor):
    """One group, which is released and resumed as it is told; each look is a step on the way."""

    role = SUPERVISOR
    codec = NODE_CODEC

    def __init__(self) -> None:
        self.state, self.pool_bytes, self.weights = "held", 4096, ""
        self.asked: list[Any] = []
        self.refusals: list[tuple[str, bool]] = []
        self.is_stuck = False

    def on_ask(self, call: Call) -> None:
        self.asked.append(call.message)
        if self.refusals:
            code, retryable = self.refusals.pop(0)
            call.fail(code, "as told", retryable=retryable)
            return
        match call.message:
            case ReleaseMemory(_, keep_weights, keep_kv, _):
                self.state = "releasing" if self.state == "held" else self.state
                self.weights = "keep" if keep_weights else "reload"
                self.pool_bytes = 4096 if keep_kv else 0
            case ResumeMemory():
                self.state, self.pool_bytes, self.weights = "resuming", 4096, ""
            case ListMemory() if not self.is_stuck:
                self.state = {"releasing": "released", "resuming": "held"}.get(self.state, self.state)
            case _:
                pass
        group = GroupMemory(group="0", state=self.state, weights=self.weights, pool_bytes=self.pool_bytes)
        call.reply(MemoryList(groups=[group]))


class Scheduler(Actor):
    """Has pages, and may be busy."""

    role = SCHEDULER
    codec = NODE_CODEC

    def __init__(self) -> None:
        self.num_pages, self.failure = 7, ("", False)

    def on_ask(self, call: Call) -> None:
        code, retryable = self.failure
        match call.message:
            case CancelAttempts(attempts):
                call.reply(AttemptsCancelled(attempts=attempts))
            case FlushCache() if code:
                call.fail(code, "as told", retryable=retryable)
            case FlushCache():
                num_pages, self.num_pages = self.num_pages, 0
                call.reply(CacheFlushed(num_pages=num_pages))
            case _:
                # Attempts are not answered, and so wait.
                pass


class Worker(Actor):
    """Is there."""

    role = WORKER
    codec = NODE_CODEC


def steered(path: Path, test: Callable[[Ring, httpx.AsyncClient, Supervisor], Any], **settings: Any) -> None:
    """Play with a supervisor, and with an admin's key and another one."""

    async def with_supervisor(ring: Ring, client: httpx.AsyncClient) -> None:
        supervisor = Supervisor()
        await ring.start("supervisor", supervisor)
        # `d0` of the ring answers no flush; the worker and this scheduler are those of the group `0`.
        await ring.kill("d0")
        await ring.start("scheduler-0", Scheduler())
        await ring.start("worker-0", Worker())
        ctx = ring.gateway.ctx
        await until(lambda: all(ctx.members.get(one) for one in ("supervisor", "scheduler-0", "worker-0")))
        await until(lambda: ctx.members.get("d0") is None)
        client.headers.update(ADMIN)
        await test(ring, client, supervisor)

    keys = write_keys(path / "keys", "alice", "ops admin")
    play(with_supervisor, api_key_file=keys, **{"control": True} | settings)


@pytest.mark.parametrize("path", sorted(CONTROLLED))
def test_without_control_nobody_may_and_is_told_what_to_do(served: Any, path: str) -> None:
    for answer in (httpx.get(served.url + path), httpx.post(served.url + path, json={})):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (403, "permission_error", "control_off")
        assert path in error["message"]
        assert "meshctl up --control" in error["message"]


def test_with_control_an_admins_key_is_needed(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient, supervisor: Supervisor) -> None:
        for path in CONTROLLED:
            assert (await client.get(path, headers={"authorization": ""})).status_code == 401
            refused = await client.post(path, headers=ALICE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
        assert supervisor.asked == []

    steered(tmp_path, test)


def test_flushed_where_all_are_idle_and_not_where_one_is_busy(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient, supervisor: Supervisor) -> None:
        scheduler: Any = ring.systems["scheduler-0"].actor
        for method, pages in (("GET", 7), ("POST", 0)):
            answer = await client.request(method, "/flush_cache")
            assert (answer.status_code, answer.text) == (200, f"Cache flushed: {pages} pages are free now.\n")
        scheduler.failure = ("busy", True)
        answer = await client.get("/flush_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_idle")
        # One that starts may find what the one before it left; without KV there is nothing to be found.
        scheduler.failure = ("not_ready", True)
        answer = await client.get("/flush_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "flush_failed")
        assert (await client.post(RELEASE, json={})).status_code == 200
        assert (await client.get("/flush_cache")).status_code == 200
        # A request that no scheduler has: nobody is there who could take it.
        scheduler.failure = ("", False)
        asked = asyncio.ensure_future(client.post("/generate", json={"text": "x", "rid": "r"}))
        await until(lambda: ring.gateway.service.core.num_requests == 1)
        answer = await client.get("/flush_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_idle")
        loads = (await client.get("/v1/loads?include=core")).json()["loads"]
        assert [(one["num_running_reqs"], one["num_waiting_reqs"], one["num_total_reqs"]) for one in loads] == [
            (0, 1, 1)
        ]
        await client.post("/abort_request", json={"abort_all": True})
        assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await client.get("/v1/loads?include=core")).json()["loads"][0]["num_total_reqs"] == 0

    steered(tmp_path, test)


def test_released_and_resumed_as_trainers_ask(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient, supervisor: Supervisor) -> None:
        async def ask(path: str, body: Any = None) -> dict[str, Any]:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["groups"][0]

        # Twice the same is no error.
        for body in ({}, {"tags": ["kv_cache", "weights"]}, {"tags": None}):
            assert await ask(RELEASE, body) == {"group": "0", "state": "released", "weights": "reload", "pool_bytes": 0}
        assert supervisor.asked[0] == ReleaseMemory()
        # Nothing could be served with weights alone: both come with the KV, which trainers ask for next.
        assert (await ask(RESUME, {"tags": ["weights"]}))["state"] == "released"
        assert not any(isinstance(message, ResumeMemory) for message in supervisor.asked)
        assert (await ask(RESUME, {"tags": ["kv_cache", "cuda_graph"]}))["state"] == "held"
        assert ResumeMemory(groups=["0"]) in supervisor.asked
        assert (await ask(RESUME))["state"] == "held"
        for tags, message in (
            (["kv_cache"], ReleaseMemory(keep_weights=True)),
            (["weights"], ReleaseMemory(keep_kv=True)),
        ):
            supervisor.asked.clear()
            assert (await ask(RELEASE, {"tags": tags}))["state"] == "released"
            assert supervisor.asked[0] == message
            assert (await ask(RESUME, {"tags": tags}))["state"] == "held"
        assert (await ask(RELEASE, {"tags": ["cuda_graph"]}))["state"] == "held"

    steered(tmp_path, test)


def test_what_becomes_of_refusals_and_of_those_who_want_the_opposite(tmp_path: Path) -> None:
    async def test(ring: Ring, client: httpx.AsyncClient, supervisor: Supervisor) -> None:
        async def code_of(path: str, status: int, **body: Any) -> str:
            answer = await client.post(path, json=body)
            assert answer.status_code == status, answer.text
            return answer.json()["error"]["code"]

        supervisor.refusals = [("no_agent", True), ("memory_saver_off", False)]
        assert await code_of(RELEASE, 400) == "memory_saver_off"
        supervisor.refusals = [("already_released", False)]
        assert await code_of(RELEASE, 409) == "already_released"
        supervisor.refusals = [("no_agent", True)]
        assert await code_of(RESUME, 503) == "no_agent"
        for tags in (["kv"], ["weights", ""], [7], "kv_cache"):
            answer = await client.post(RELEASE, json={"tags": tags})
            assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, "tags")
        for body in (b"[]", b"nonsense", b'{"tags": {}}'):
            assert (await client.post(RESUME, content=body)).status_code == 400
        supervisor.is_stuck = True
        assert await code_of(RELEASE, 504) == "memory_timeout"
        supervisor.asked.clear()
        asked = asyncio.ensure_future(client.post(RELEASE, json={}))
        await until(lambda: any(isinstance(one, ListMemory) for one in supervisor.asked))
        supervisor.state = "resuming"
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "undone")
        await ring.kill("supervisor")
        await until(lambda: ring.gateway.ctx.members.get("supervisor") is None)
        assert await code_of(RESUME, 503) == "unreachable"

    steered(tmp_path, test, memory_timeout_s=1.0)


TAG_SETS = st.sets(st.sampled_from(["kv_cache", "weights", "cuda_graph"]))
GROUPS = st.builds(
    GroupMemory,
    group=st.sampled_from(["a", "b"]),
    state=st.sampled_from(["held", "released", "releasing", "resuming"]),
    pool_bytes=st.sampled_from([0, 4096]),
)


@given(TAG_SETS, st.lists(GROUPS, max_size=4))
def test_tags_name_what_is_released_and_who_can_use_what_is_resumed(
    tags: set[str], groups: Sequence[GroupMemory]
) -> None:
    wish = wish_to_release(tags)
    named = tags or {"kv_cache", "weights"}
    assert (wish is None) == (named == {"cuda_graph"})
    if wish is not None:
        assert (not wish.keep_kv, not wish.keep_weights) == ("kv_cache" in named, "weights" in named)
    resumed = groups_to_resume(tags, groups)
    away = [group.group for group in groups if group.state != "held"]
    assert set(resumed) <= set(away)
    if "kv_cache" in named:
        assert resumed == away


@pytest.mark.parametrize("path", sorted(NOT_YET))
def test_what_weights_need_is_said_not_to_be_there_yet(served: Any, path: str) -> None:
    for answer in (httpx.post(served.url + path, json={}), httpx.post(served.url + path + "/", content=b"x" * 1000)):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (501, "not_implemented")
        assert path in error["message"]
        assert "weights cannot be updated" in error["message"]


def test_load_where_somebody_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a router an error is less than no load; who acts on there being none has to know."""

    async def test(ring: Ring, client: httpx.AsyncClient, supervisor: Supervisor) -> None:
        async def answers(ctx: Any, members: Any, timeout_s: float) -> list[ActorStats]:
            stats = StatsReply(counters={}, gauges={"mesh_scheduler_load_tokens": 7.5})
            found = [ActorStats("gateway-9", GATEWAY, 1, None)]
            return found + [ActorStats(one.actor_id, one.role, 1, stats) for one in members]

        monkeypatch.setattr("nodes.gateway.control.load.ask_stats", answers)
        assert (await client.get("/get_load")).json()[0]["num_tokens"] > 0
        assert (await client.get("/server_info")).status_code == 200
        for path, code in (("/v1/loads", "load_unknown"), ("/flush_cache", "flush_failed")):
            refused = await client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, code)
            assert "gateway-9 does not say" in refused.json()["error"]["message"]
            assert ("flushed" in refused.json()["error"]["message"]) is (path == "/flush_cache")

    steered(tmp_path, test)


def test_ranks_of_a_server_are_those_of_its_largest_group() -> None:
    def member(role: str, group: str) -> Member:
        return Member(f"{role}-{group}", role, 1, Endpoint(control="", data=""), attributes={"group": group})

    members = [member(SCHEDULER, "a"), member(SCHEDULER, "b"), *[member(WORKER, group) for group in "abb"]]
    load = Load(3, 2, 700)
    for some, tp_size in ((members, 2), (members[:2], 1), ([], 1)):
        found = server_info(CONFIG, some, load, "1")
        assert (found.tp_size, found.dp_size) == (tp_size, 1)
    assert msgspec.to_builtins(tokens_of(load)) == {
        "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 700, "dp_rank": 0
    }  # fmt: skip


def test_what_is_served_in_sglangs_words(served: Any) -> None:
    def get(path: str) -> Any:
        answer = httpx.get(served.url + path)
        assert answer.status_code == 200
        return answer.json()

    assert get("/get_load") == [{"num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 480, "dp_rank": 0}]
    for prefix in ("/", "/get_"):
        assert get(prefix + "weight_version") == {"weight_version": "default"}
        model = get(prefix + "model_info")
        assert (model["model_path"], model["is_generation"], model["weight_version"]) == ("test", True, "default")
        server = get(prefix + "server_info")
        # What slime reads of a server that it did not start itself.
        assert (server["tp_size"], server["pp_size"], server["ep_size"], server["disaggregation_mode"]) == (
            1,
            1,
            1,
            "null",
        )
        # A router takes a server of two ranks for two, and names one of them in what it sends.
        assert (server["dp_size"], server["internal_states"][0]["num_running_reqs"]) == (1, 0)
        assert server["version"]
