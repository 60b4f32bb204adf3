"""Which web pages may call this gateway and read its answers: `[roles.gateway] cors_origins`. Pure.

Credentials are not allowed: keys of this server's clients travel in headers, not cookies.
"""

from collections.abc import Collection, Mapping
from typing import Final

from nodes.gateway.errors import BadRequest

_METHODS: Final = ("GET", "POST", "DELETE")
_METHOD, _HEADERS, _PRIVATE_NETWORK = (
    b"access-control-request-" + what for what in (b"method", b"headers", b"private-network")
)
_EXPOSED: Final = (b"access-control-expose-headers", b"X-Request-Id, X-Kvmesh-Request-Id, Retry-After")
_REMEMBERED_S: Final = 600
"""How long a browser asks no more; a change of `cors_origins` is seen as late."""

Headers = list[tuple[bytes, bytes]]


class Origins:
    """The pages that may: `*` are all."""

    def __init__(self, origins: Collection[str]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(one.encode() for one in origins)

    def of_answers(self, asked: Mapping[bytes, bytes]) -> Headers:
        """What every answer to a request with these headers has besides."""
        headers, origin = [(b"vary", b"Origin")], asked.get(b"origin")
        if origin is not None:
            headers.append(_EXPOSED)
            if self._allows(origin):
                headers.append((b"access-control-allow-origin", b"*" if self._all else origin))
        return headers

    def is_preflight(self, method: str, asked: Mapping[bytes, bytes]) -> bool:
        """Whether this is what a browser asks before it sends a request."""
        return method == "OPTIONS" and b"origin" in asked and _METHOD in asked

    def of_preflight(self, asked: Mapping[bytes, bytes]) -> Headers:
        """What its answer has besides. Raises BadRequest for what pages may not send."""
        origin = asked[b"origin"]
        refused = {
            "origin": not self._allows(origin),
            "method": asked[_METHOD].decode("latin-1") not in _METHODS,
            "private-network": _PRIVATE_NETWORK in asked,
        }
        if any(refused.values()):
            raise BadRequest(
                f"Disallowed CORS {', '.join(name for name, is_refused in refused.items() if is_refused)}: "
                f"pages from {origin[:200].decode('latin-1')!r} may not send this request. "
                "The server's cors_origins (`--cors-origin`) lists the origins that may, with GET, POST and DELETE.",
                code="cors_refused",
            )
        headers = [
            (b"access-control-allow-methods", ", ".join(_METHODS).encode()),
            (b"access-control-max-age", b"%d" % _REMEMBERED_S),
            (b"vary", b", ".join((_METHOD, _HEADERS, _PRIVATE_NETWORK))),
        ]
        if _HEADERS in asked:
            # All of them are allowed.
            headers.append((b"access-control-allow-headers", asked[_HEADERS]))
        return headers

    def _allows(self, origin: bytes) -> bool:
        return self._all or origin in self._origins
