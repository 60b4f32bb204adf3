"""What a request is called: by us, which is the key of everything, and by its client, which is a remark.

Our id is new for every request, in its body, in its headers, in its errors and in each line of a log that is about it,
at whatever actor; samples have `-0`, `-1`, … behind it. A client's `X-Request-Id` and `traceparent` are echoed and
logged beside it and never looked up by: two clients may well call their requests alike.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from uuid import uuid4

MAX_CHARS: Final = 128
_FOREIGN = re.compile(r"[^A-Za-z0-9_.:;/+=@,~|#-]")
"""Whatever could end a header, a line of a log or a value in it. What proxies and clients make ids of is left."""
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Headers = list[tuple[bytes, bytes]]


class RequestNames(NamedTuple):
    """One request's names; `client` and `traceparent` are empty where the client gave none that can be used. `path` is
    what it asked for, in the characters of a name, and `unread` a `traceparent` that is none.
    """

    ours: str
    client: str = ""
    traceparent: str = ""
    path: str = ""
    unread: str = ""

    def called(self, client: str) -> "RequestNames":
        """The same, with what the client calls it in the body. A header's name stays: proxies log by it."""
        return self if self.client else self._replace(client=_FOREIGN.sub("_", client[:MAX_CHARS]))

    def headers(self) -> Headers:
        """What every answer says."""
        ours = self.ours.encode()
        headers = [(b"x-request-id", self.client.encode() or ours), (b"x-kvmesh-request-id", ours)]
        if self.traceparent:
            headers.append((b"traceparent", self.traceparent.encode()))
        return headers

    def fields(self) -> dict[str, str]:
        """What a line of the log says beside our id."""
        fields = {"x_request_id": self.client, "traceparent": self.traceparent, "path": self.path}
        return {name: value for name, value in fields.items() if value}


UNNAMED: Final = RequestNames("")
"""Of calls that no client made."""


def names_of(headers: Mapping[bytes, bytes], prefix: str = "req-", path: str = "") -> RequestNames:
    """A new id of ours that begins with `prefix`, and what the client calls its request for `path`."""
    client = headers.get(b"x-request-id", b"")[:MAX_CHARS].decode("latin-1")
    trace = headers.get(b"traceparent", b"")
    traceparent = trace.decode() if _TRACEPARENT.fullmatch(trace) else ""
    unread = "" if traceparent else _FOREIGN.sub("_", trace[:MAX_CHARS].decode("latin-1"))
    client, path = _FOREIGN.sub("_", client), _FOREIGN.sub("_", path[:MAX_CHARS])
    return RequestNames(prefix + uuid4().hex, client, traceparent, path, unread)
