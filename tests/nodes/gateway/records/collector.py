"""A collector of OTLP over HTTP: what is posted to it, decoded; it can be told to refuse, or to let callers wait."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """`requests` are `ExportTraceServiceRequest`s, with their paths and headers in `heads`."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.heads: list[tuple[str, dict[str, str]]] = []
        self.status = 200
        self.url = ""
        self.arrived = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def spans(self) -> list[Any]:
        scopes = [scope for request in self.requests for one in request.resource_spans for scope in one.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    @property
    def resource(self) -> dict[str, str]:
        """Of the first request."""
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {one.key: one.value.string_value for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.heads.append((self.path, dict(self.headers.items())))
            collector.arrived.release()
            collector.may_answer.wait(30)
            if collector.status == 200:
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Not to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        collector.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()
