import io
import json

import pytest
import structlog

from mesh.runtime.telemetry import SECONDS, Metrics, new_traceparent, series, setup_log
from mesh.wire.frames import SYSTEM_CODEC


def test_series_are_those_of_prometheus():
    assert series("mesh_x_total", {}) == "mesh_x_total"
    assert series("mesh_x", {"b": "2", "a": 'say "hi"\n\\'}) == 'mesh_x{a="say \\"hi\\"\\n\\\\",b="2"}'


def test_counts_gauges_and_histograms():
    metrics = Metrics()
    metrics.count("calls_total")
    metrics.count("calls_total", 2, role="a")
    metrics.count("calls_total", role="a")
    metrics.gauge("depth", 4)
    metrics.gauge("depth", 3)
    for seconds in (0.0001, 0.0002, 0.3, 1000.0):
        metrics.observe("took_seconds", seconds)
    reply = metrics.snapshot({"polled": 7.0})
    assert reply.counters == {"calls_total": 1.0, 'calls_total{role="a"}': 3.0}
    assert reply.gauges == {"depth": 3.0, "polled": 7.0}
    histogram = reply.histograms["took_seconds"]
    assert sum(histogram.counts) == 4
    assert histogram.counts[0] == histogram.counts[1] == histogram.counts[-1] == 1
    assert histogram.total == pytest.approx(1000.3003)
    assert histogram.bounds == list(SECONDS)
    assert SYSTEM_CODEC.decode(SYSTEM_CODEC.encode(reply)) == reply
    assert metrics.value("calls_total", role="a") == 3.0
    assert metrics.value("depth") == 3.0
    assert metrics.value("unknown") == 0.0


def test_the_number_of_series_is_bounded():
    metrics = Metrics()
    for number in range(5000):
        metrics.count("by_request_total", request=str(number))
        metrics.gauge("by_request", 1, request=str(number))
        metrics.observe("by_request_seconds", 1, request=str(number))
    reply = metrics.snapshot()
    assert len(reply.counters) + len(reply.gauges) + len(reply.histograms) <= 4097
    assert reply.counters["mesh_series_dropped_total"] > 10_000


def test_a_traceparent_is_w3c(monkeypatch):
    import random

    version, trace, span, flags = new_traceparent(random.Random(1)).split("-")
    assert (version, len(trace), len(span), flags) == ("00", 32, 16, "01")


def test_the_log_is_one_json_object_a_line():
    out = io.StringIO()
    setup_log(stream=out)
    log = structlog.get_logger(actor="a")
    log.debug("not shown")
    log.info("shown", where=object)
    try:
        raise ValueError("bad")
    except ValueError as error:
        log.error("failed", exc_info=error)
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["event"] == "shown"
    assert first["level"] == "info"
    assert first["actor"] == "a"
    assert "ValueError: bad" in second["exception"]


def test_a_console_gets_words():
    out = io.StringIO()
    setup_log(stream=out, json=False, level="debug")
    structlog.get_logger().debug("shown", x=1)
    assert "shown" in out.getvalue()


def test_a_log_that_vanished_is_survived():
    out = io.StringIO()
    setup_log(stream=out)
    log = structlog.get_logger()
    out.close()
    log.info("to nobody")
