"""Spans of calls reach a collector as OTLP, and a collector that is away, slow or out of order holds nobody up."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from mesh.testing.ports import free_port
from nodes.gateway.records.otel import export
from nodes.gateway.records.otel.export import MAX_WAITING, ExportUnusable, SpanExport, check_endpoint
from nodes.gateway.records.otel.told_spans import told_spans
from nodes.protocol.records import CallRecord
from tests.nodes.gateway.records.collector import Collector, collecting
from tests.nodes.gateway.records.test_told_spans import CALL, THEIRS

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BATCH_S", 0.01)
    monkeypatch.setattr(export, "TIMEOUT_S", 0.5)


def exporting(url: str, told: list[str] | None = None) -> SpanExport:
    return SpanExport(url, {"service.name": "kvmesh", "host.name": "h"}, (told if told is not None else []).append)


def until(what: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def test_a_call_arrives_as_it_was_told(collector: Collector) -> None:
    sending = exporting(collector.url)
    sending.add(msgspec.structs.replace(CALL, traceparent=THEIRS))
    until(lambda: sending.num_exported == 1)
    sending.close()
    assert collector.heads[0][0] == "/v1/traces"
    assert collector.resource.items() >= {"service.name": "kvmesh", "host.name": "h"}.items()
    wanted = told_spans(msgspec.structs.replace(CALL, traceparent=THEIRS))
    assert {span.trace_id.hex() for span in collector.spans} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    assert [(span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in collector.spans] == [
        (span.name, span.begin_ns, span.end_ns) for span in wanted
    ]
    assert [int.from_bytes(span.parent_span_id) for span in collector.spans] == [span.parent_id for span in wanted]
    root = collector.spans[0]
    assert (root.kind, root.parent_span_id.hex()) == (2, "00f067aa0ba902b7")
    numbers = {one.key: one.value.int_value for one in root.attributes}
    assert (numbers["gen_ai.usage.output_tokens"], numbers["http.response.status_code"]) == (7, 200)
    assert [event.name for event in root.events] == ["worker-0 died"]
    failed = [(span.name, span.status.message) for span in collector.spans if span.status.code == 2]
    assert failed == [("attempt", "peer_lost")]


def test_many_calls_go_in_few_requests_and_what_waits_at_the_end_is_sent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "BATCH_S", 60.0)
    sending = exporting(f"{collector.url}/")
    for number in range(100):
        sending.add(CallRecord(request_id=f"c-{number}", total_s=1.0))
    sending.add(CallRecord(request_id="unwanted", traceparent=THEIRS[:-2] + "00"))
    sending.close()
    assert (len(collector.requests), len(collector.spans)) == (2, 200), "a call without samples and its one stage"
    figures = sending.figures()
    assert figures['mesh_otel_calls_total{outcome="exported"}'] == 100
    assert figures['mesh_otel_calls_total{outcome="unsampled"}'] == 1
    assert sum(figures.values()) == 101


def test_a_slow_collector_holds_up_nobody_and_what_does_not_fit_is_counted(collector: Collector) -> None:
    collector.may_answer.clear()
    sending = exporting(collector.url)
    sending.add(CALL)
    assert collector.arrived.acquire(timeout=20)
    began = time.perf_counter()
    for _ in range(MAX_WAITING + 10):
        sending.add(CALL)
    took_s = time.perf_counter() - began
    assert sending.num_dropped == 10
    assert took_s < 1.0, "2,058 calls of 1 µs each, beside a thread that waits"
    collector.may_answer.set()
    sending.close()


@pytest.mark.parametrize("status", [None, 503, 400])
def test_a_collector_that_is_away_or_refuses_is_said_and_counted(collector: Collector, status: int | None) -> None:
    told: list[str] = []
    collector.status = status or 200
    url = collector.url if status else f"http://127.0.0.1:{free_port()}"
    sending = exporting(url, told)
    sending.add(CALL)
    until(lambda: sending.num_failed == 1)
    assert told == [f"{url}/v1/traces does not take spans"]
    if status:
        collector.status = 200
        sending.add(CALL)
        until(lambda: sending.num_exported == 1)
        assert collector.spans, "it goes on when the collector does"
    sending.close()


def test_closing_does_not_wait_for_a_collector_that_does_not_answer(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CLOSE_S", 0.2)
    monkeypatch.setattr(export, "TIMEOUT_S", 30.0)
    collector.may_answer.clear()
    sending = exporting(collector.url)
    sending.add(CALL)
    assert collector.arrived.acquire(timeout=20)
    began = time.perf_counter()
    sending.close()
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://", "x"])
def test_what_is_no_url_is_said(endpoint: str) -> None:
    with pytest.raises(ExportUnusable, match="http://collector:4318"):
        check_endpoint(endpoint)


def test_a_path_is_kept() -> None:
    assert check_endpoint("https://api.example/otlp/v1/traces") == "https://api.example/otlp/v1/traces"
    assert check_endpoint("http://c:4318") == check_endpoint("http://c:4318/") == "http://c:4318/v1/traces"


def test_a_gateway_without_an_endpoint_imports_nothing_of_it() -> None:
    code = "import sys, nodes.gateway.actor; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
