"""Sends the spans of calls that ended to a collector, by OTLP over HTTP, in a thread of its own.

    RequestAccount --add--> queue, MAX_WAITING calls --thread, once a second--> spans --OTLP/HTTP--> collector

The event loop appends to a queue and does nothing else. The thread imports OpenTelemetry (extra `otel`), makes spans of
records, and waits for the collector as long as that takes: meanwhile the queue fills, and what does not fit is counted.
"""

import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from mesh.errors import TypedError
from nodes.gateway.records.otel.told_spans import ToldSpan, is_wanted, told_spans, trace_id_of
from nodes.protocol.records import CallRecord

MAX_WAITING: Final = 2048
"""Calls: some 4 MB, and at 100 a second twenty of them, in which a collector may be started again."""
MAX_BATCH: Final = 64
"""Calls in one request, of a dozen spans each: what collectors and OpenTelemetry's own processor take at once (512)."""
BATCH_S: Final = 1.0
"""A trace is looked for when somebody has noticed a call, which takes longer."""
TIMEOUT_S: Final = 5.0
"""Of one request with its repetitions: one second, two, and the last one."""
CLOSE_S: Final = 1.0
"""What is still to be sent when a gateway ends has so long: its supervisor waits for it."""
_PATH: Final = "/v1/traces"
_NEEDED: Final = "opentelemetry.exporter.otlp.proto.http"


class ExportUnusable(TypedError, code="otel_unusable"):
    """Spans cannot be sent: the endpoint is no URL, or OpenTelemetry is not installed."""


def check_endpoint(endpoint: str) -> str:
    """The URL to which spans are posted. Raises ExportUnusable."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ExportUnusable(f"{endpoint!r} is no URL of a collector: write it like http://collector:4318")
    try:
        is_there = importlib.util.find_spec(_NEEDED) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ExportUnusable("spans cannot be exported: OpenTelemetry is not installed; pip install 'kvmesh[otel]'")
    return endpoint if url.path.strip("/") else endpoint.rstrip("/") + _PATH


class SpanExport:
    """The calls of one gateway. `tell` is called in the thread, with why nothing could be sent.

    Raises ExportUnusable. `resource` says who sends, beside what `OTEL_RESOURCE_ATTRIBUTES` says.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, str], tell: Callable[[str], None]) -> None:
        self._url = check_endpoint(endpoint)
        self._attributes = dict(resource)
        self._tell = tell
        self._waiting: deque[CallRecord] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._exporter: Any = None
        # Each written by one thread: the first two by the loop's, the others by the exporter's.
        self.num_dropped = self.num_unwanted = self.num_exported = self.num_failed = 0
        # A daemon: a collector that hangs must not keep a process that has ended its work.
        self._thread = threading.Thread(target=self._run, name="otel", daemon=True)
        self._thread.start()

    def add(self, call: CallRecord) -> None:
        """A call has ended. Costs what appending to a list does."""
        if not is_wanted(call):
            self.num_unwanted += 1
        elif len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
        else:
            self._waiting.append(call)
            if not self._wake.is_set():
                self._wake.set()

    def figures(self) -> dict[str, float]:
        """Calls by what became of their spans."""
        counts = {
            "exported": self.num_exported, "failed": self.num_failed, "dropped": self.num_dropped,
            "unsampled": self.num_unwanted,
        }  # fmt: skip
        return {f'mesh_otel_calls_total{{outcome="{outcome}"}}': float(num) for outcome, num in counts.items()}

    def close(self) -> None:
        """Send what waits, for `CLOSE_S` at most. Blocks: not to be called on the event loop's thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() and self._exporter is not None:
            # It waits to try again: this ends that.
            self._exporter.shutdown()

    def _run(self) -> None:
        try:
            exporter = self._exporter = _exporter(self._url)
            resource = _resource(self._attributes)
        except Exception as error:  # noqa: BLE001 - whatever an installation is short of, requests are served
            self._tell(f"OpenTelemetry cannot be used: {type(error).__name__}: {error}")
            exporter = resource = None
        is_last = False
        while not is_last:
            self._wake.wait()
            # What ends meanwhile goes with it.
            self._closing.wait(BATCH_S)
            self._wake.clear()
            is_last = self._closing.is_set()
            while self._waiting:
                calls = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                if exporter is None or resource is None or not self._send(exporter, resource, calls):
                    self.num_failed += len(calls)
                else:
                    self.num_exported += len(calls)

    def _send(self, exporter: Any, resource: Any, calls: Sequence[CallRecord]) -> bool:
        try:
            spans = [span for call in calls for span in _readable(call, resource)]
            if exporter.export(spans).name == "SUCCESS":
                return True
            self._tell(f"{self._url} does not take spans")
        except Exception as error:  # noqa: BLE001 - one call that cannot be told must not end the thread
            self._tell(f"spans cannot be sent: {type(error).__name__}: {error}")
        return False


def _exporter(url: str) -> Any:
    """An `OTLPSpanExporter`. Without its types: they are there only where the extra is installed."""
    # It logs each try through `logging`, which nobody has set up here: a line for each second of an outage.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    return import_module(f"{_NEEDED}.trace_exporter").OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)


def _resource(attributes: Mapping[str, str]) -> Any:
    return import_module("opentelemetry.sdk.resources").Resource.create(dict(attributes))


def _readable(call: CallRecord, resource: Any) -> list[Any]:
    """The `ReadableSpan`s of a call."""
    api, sdk = import_module("opentelemetry.trace"), import_module("opentelemetry.sdk.trace")
    scope = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("kvmesh.gateway")
    trace_id, flags = trace_id_of(call), api.TraceFlags(api.TraceFlags.SAMPLED)

    def context(span_id: int, *, is_remote: bool = False) -> Any:
        return api.SpanContext(trace_id, span_id, is_remote, flags)

    def one(told: ToldSpan) -> Any:
        fields: dict[str, Any] = {}
        if told.parent_id:
            fields["parent"] = context(told.parent_id, is_remote=told.is_remote_parent)
        if told.failure:
            fields["status"] = api.Status(api.StatusCode.ERROR, told.failure)
        return sdk.ReadableSpan(
            told.name,
            context=context(told.span_id),
            resource=resource,
            attributes=told.attributes,
            events=[sdk.Event(event.name, event.attributes, event.at_ns) for event in told.events],
            kind=api.SpanKind.SERVER if told.is_server else api.SpanKind.INTERNAL,
            start_time=told.begin_ns,
            end_time=told.end_ns,
            instrumentation_scope=scope,
            **fields,
        )

    return [one(told) for told in told_spans(call)]
