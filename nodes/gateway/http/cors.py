"""Which web pages may call this gateway and read its answers: `[roles.gateway] cors_origins`. For `routes/app.py`."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from nodes.gateway.errors import BadRequest
from nodes.gateway.request_names import names_of

_EXPOSED = ("X-Request-Id", "X-Kvmesh-Request-Id", "Retry-After")


class CrossOrigin(CORSMiddleware):
    """Answers preflights and lets pages of `origins` (`*`: all) read answers. Installed only if origins are configured,
    because it costs a call for each piece of a stream. Credentials are not allowed: keys of this server's clients
    travel in headers, not cookies.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(app, origins, ("GET", "POST", "DELETE"), ("*",), expose_headers=_EXPOSED)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Starlette's answer; a refusal has the form of all other errors."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        why = bytes(response.body).decode()
        error = BadRequest(
            f"{why}: pages from {request_headers['origin'][:200]!r} may not send this request. "
            "The server's cors_origins (`--cors-origin`) lists the origins that may, with GET, POST and DELETE.",
            code="cors_refused",
        )
        names = names_of(dict(request_headers.raw))
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        said = {name.decode(): value.decode() for name, value in names.headers()}
        return Response(error.body(names.ours), error.status, kept | said, media_type="application/json")
