"""What the gateway logs about a request that took long, and where the lines of its calls go."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mesh.testing.ports import free_port
from nodes.gateway.config import GatewayConfig
from nodes.gateway.records.account import RequestAccount
from nodes.gateway.request_names import UNNAMED, RequestNames
from nodes.gateway.requests.events import End
from nodes.gateway.requests.sample_log import SampleLog
from nodes.protocol.records import CallRecord, FindCalls
from nodes.request import Stages
from tests.nodes.gateway.records.collector import collecting


def context(now: float = 0.0) -> Mock:
    ctx = Mock()
    ctx.address.actor_id, ctx.address.epoch = "gateway-0", 3
    ctx.describe.return_value.host = "a"
    ctx.now.return_value = now
    return ctx


def config(**fields: Any) -> GatewayConfig:
    return GatewayConfig(model_name="m", context_length=100, **fields)


def ended(elapsed_s: float, first_token_s: float | None = 5.0) -> End:
    log = SampleLog(0.0)
    log.submitted(0, "d0", "", "", 0.0)
    log.staged(Stages(1.0, 0.5, 2.0), 3.5)
    log.submitted(1, "d1", "p1", "", 6.0)
    log.staged(Stages(1.0, transfer_s=0.25), 8.0)
    if first_token_s is not None:
        log.first_token(first_token_s)
    sample = log.record("r-0", 3, 0, 4, last_token=elapsed_s, ended=elapsed_s)
    return End("r-0", "stop", None, 3, 4, 0, elapsed_s, 14.0, None, sample)


@pytest.mark.parametrize(
    ("slow_s", "elapsed_s", "is_slow"), [(30.0, 31.0, True), (30.0, 29.9, False), (0.0, 3e3, False)]
)
def test_a_slow_request_is_logged_with_the_stages_of_all_attempts(
    slow_s: float, elapsed_s: float, is_slow: bool
) -> None:
    ctx = context()
    RequestAccount(ctx, config(slow_request_s=slow_s)).ended(ended(elapsed_s), UNNAMED, 0, None)
    if not is_slow:
        ctx.log.warning.assert_not_called()
        return
    told = ctx.log.warning.call_args.kwargs
    stages = (told["queue_s"], told["grant_s"], told["prefill_s"], told["transfer_s"])
    assert stages == (2.0, 0.5, 2.0, 0.25)
    assert (told["attempts"], told["decode"], told["prefill"], told["stall_s"]) == (2, "d1", "p1", 14.0)
    assert told["first_token_s"] == 5.0


def test_a_slow_request_without_a_token_has_no_time_of_the_first() -> None:
    ctx = context()
    RequestAccount(ctx, config()).ended(ended(31.0, first_token_s=None), UNNAMED, 0, None)
    assert "first_token_s" not in ctx.log.warning.call_args.kwargs


def test_a_call_leaves_a_line_and_a_full_disk_only_costs_lines(tmp_path: Path) -> None:
    ctx, folder = context(), tmp_path / "requests"
    account = RequestAccount(ctx, config(request_log_folder=str(folder)))
    names = RequestNames("req-1", client="mine", path="/v1/completions", key="alice")
    track = account.begin(names, 0.0)
    ctx.now.return_value = 2.0
    account.end(track, 200, "")
    file = folder / "gateway-0.jsonl"
    line = json.loads(file.read_bytes())
    told = {name: line[name] for name in ("request_id", "client_id", "route", "key", "status", "total_s", "gateway")}
    assert told == {
        "request_id": "req-1", "client_id": "mine", "route": "/v1/completions", "key": "alice", "status": 200,
        "total_s": 2.0, "gateway": "gateway-0",
    }  # fmt: skip
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert account.find(FindCalls(name="mine"), lambda _: None).calls[0].request_id == "req-1"
    asyncio.run(account.close())

    broken = RequestAccount(ctx, config(request_log_folder="/dev/full/x"))
    for number in range(3):
        broken.end(broken.begin(RequestNames(f"req-{number}"), 0.0), 200, "")
    assert ctx.metrics.count.call_args_list[-1].args == ("mesh_request_lines_lost_total",)
    assert [call.args[0] for call in ctx.log.warning.call_args_list] == ["request_line_lost"], "one line says so"
    assert broken.find(FindCalls(last=5), lambda _: None).num == 3, "they are known all the same"


async def test_ended_calls_go_to_a_collector_when_there_is_one() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    ctx = context()
    with collecting() as collector:
        account = RequestAccount(ctx, config(otel_endpoint=collector.url, client_salt="shop"))
        account.end(account.begin(RequestNames("req-1", path="/v1/completions"), 0.0), 200, "")
        await account.close()
        assert [span.name for span in collector.spans][:1] == ["POST /v1/completions"]
        told = collector.resource
    assert told["service.name"] == "kvmesh"
    assert (told["host.name"], told["kvmesh.model"], told["service.namespace"]) == ("a", "m", "shop")
    assert account.figures()['mesh_otel_calls_total{outcome="exported"}'] == 1.0
    assert RequestAccount(ctx, config()).figures() == {}


async def test_a_collector_that_is_away_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    monkeypatch.setattr("nodes.gateway.records.otel.export.TIMEOUT_S", 0.1)
    ctx = context()
    account = RequestAccount(ctx, config(otel_endpoint=f"http://127.0.0.1:{free_port()}"))
    for number in range(100):
        account.end(account.begin(RequestNames(f"req-{number}"), 0.0), 200, "")
    await account.close()
    # Turns of the loop, for what the thread has had it called.
    await asyncio.sleep(0)
    assert [call.args[0] for call in ctx.log.warning.call_args_list] == ["spans_not_exported"]
    assert account.figures()['mesh_otel_calls_total{outcome="failed"}'] == 100.0


def test_a_call_under_way_is_told_as_far_as_it_is() -> None:
    ctx = context(1.5)
    account = RequestAccount(ctx, config())
    account.begin(RequestNames("req-1", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"), 0.0)
    account.died("worker-0", 3, "killed by SIGKILL")
    (call,) = account.find(FindCalls(name="a" * 32), lambda _: None).calls
    assert (call.status, call.total_s, [death.actor for death in call.deaths]) == (0, 1.5, ["worker-0"])
    assert account.find(FindCalls(slowest=3), lambda _: None).calls == [call]
    assert account.find(FindCalls(last=3), lambda _: None).calls == list[CallRecord]()
