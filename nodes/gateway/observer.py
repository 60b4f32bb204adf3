"""What the HTTP side counts and logs."""

from mesh.actor import Context

MAX_LOGGED_FIELDS = 100


class HttpObserver:
    """Counts answers, faults and unknown fields; logs each unknown field once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._logged: set[str] = set()

    def answered(self, route: str, status: int) -> None:
        """An exchange is over; status 0 means that the client left before an answer."""
        self._ctx.metrics.count("mesh_http_requests_total", route=route, status=str(status))

    def unknown_fields(self, names: list[str]) -> None:
        """A body had fields that nobody knows; they were ignored."""
        if names:
            self._ctx.metrics.count("mesh_http_unknown_fields_total", len(names))
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add(name)
                self._ctx.log.info("unknown_field", field=name[:100])

    def failed(self, route: str, request_id: str, error: Exception) -> None:
        """A bug: something that no handler expected."""
        self._ctx.metrics.count("mesh_handler_errors_total", handler="http")
        self._ctx.log.error("http_handler_failed", route=route, request_id=request_id, exc_info=error)
