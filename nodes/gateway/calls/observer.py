"""What the HTTP side counts and logs."""

from collections.abc import Iterable

from mesh.actor import Context
from nodes.gateway.errors import ApiError
from nodes.gateway.request_names import RequestNames

MAX_LOGGED_FIELDS = 100
"""Clients choose the names: without a limit they could fill the log and this set. 100 characters of each are logged."""
QUIET_S = 10.0
"""A client that is refused tries again at once, thousands of times a second; six lines a minute say the same."""


class HttpObserver:
    """Counts answers, faults and unknown fields; logs each unknown field of a path once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._logged: set[tuple[str, str]] = set()
        self._num_refused = 0
        self._told_at: float | None = None
        ctx.metrics.begin("mesh_http_unknown_fields_total", "mesh_http_connections_refused_total")

    def serves(self, route: str, statuses: Iterable[int]) -> None:
        """There is this route, and these are the statuses that operators watch."""
        self._ctx.metrics.begin("mesh_http_requests_total", route=(route,), status=map(str, statuses))

    def answered(self, route: str, status: int) -> None:
        """An exchange is over; status 499 (`CLIENT_LEFT`) means that the client left before an answer."""
        self._ctx.metrics.count("mesh_http_requests_total", route=route, status=str(status))

    def unknown_fields(self, names: list[str], path: str) -> None:
        if names:
            self._ctx.metrics.count("mesh_http_unknown_fields_total", len(names))
        for name in names:
            # Known at one path, a field may be unknown at another: `max_tokens` of /tokenize.
            if (path, name) not in self._logged and len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add((path, name))
                self._ctx.log.info("unknown_field", field=name[:100], path=path)

    def came(self, names: RequestNames) -> None:
        if names.unread:
            # As W3C's Trace Context demands, the request then begins a trace of its own.
            self._ctx.log.debug("traceparent_unread", request_id=names.ours, traceparent=names.unread)
        if names.client or names.traceparent or names.key:
            self._ctx.log.info("request", request_id=names.ours, **names.fields())

    def refused(self, why: str) -> None:
        """A connection was refused. All are counted; one log line per `QUIET_S` says how many since the last line."""
        self._ctx.metrics.count("mesh_http_connections_refused_total")
        self._num_refused += 1
        now = self._ctx.now()
        if self._told_at is None or now - self._told_at >= QUIET_S:
            do = "raise `ulimit -n` or [roles.gateway] max_connections, or find who holds the connections (`ss -tnp`)"
            self._ctx.log.warning("connections_refused", num=self._num_refused, why=why, do=do)
            self._told_at, self._num_refused = now, 0

    def failed(self, names: RequestNames, error: ApiError) -> None:
        """Log one line, unless it was logged where it failed; of a client's mistakes only those of named requests."""
        if error.is_logged:
            return
        fields = {"request_id": names.ours, "status": error.status, "code": error.code, **names.fields()}
        if error.status >= 500:
            self._ctx.log.warning("request_failed", error=error.message, **fields)
        elif names.client or names.traceparent or names.key:
            # Without the message: it may quote a prompt (those of chat templates do).
            self._ctx.log.info("request_failed", **fields)

    def broke(self, names: RequestNames, error: Exception, answer: ApiError) -> None:
        self._ctx.metrics.count("mesh_handler_errors_total", handler="http")
        fields = {"request_id": names.ours, "status": answer.status, "code": answer.code, **names.fields()}
        self._ctx.log.error("http_handler_failed", exc_info=error, **fields)
