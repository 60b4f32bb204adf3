"""The names of a request: ours, which is the key for everything, and its client's, which is only echoed and logged.

Our id is new for every request. It is in the body, headers and errors of its answer and in each log line about it, at
every actor; samples append `-0`, `-1`, … to it. A client's `X-Request-Id` and `traceparent` are echoed and logged
beside it and are never used as keys: two clients may well give their requests the same name.
"""

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

MAX_CHARS: Final = 128
"""Two traceparents (55 each). A name is echoed, and is in each log line about its request, at every actor."""
_FOREIGN = re.compile(r"[^A-Za-z0-9_.:;/+=@,~|#-]")
"""Characters that could end a header, a log line or a value in it. Those that ids are usually made of are kept."""
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Headers = list[tuple[bytes, bytes]]


class RequestNames(NamedTuple):
    """One request's names; `client` and `traceparent` are empty if the client gave none that can be used. `path` is
    the requested path, limited to the characters of a name, and `unread` a `traceparent` that is not valid. `key` names
    the API key that it brought.
    """

    ours: str
    client: str = ""
    traceparent: str = ""
    path: str = ""
    unread: str = ""
    key: str = ""

    def called(self, client: str) -> "RequestNames":
        """These names with the client's name from the body, unless a header gave one: proxies log the header's."""
        return self if self.client else self._replace(client=_FOREIGN.sub("_", client[:MAX_CHARS]))

    def headers(self) -> Headers:
        ours = self.ours.encode()
        headers = [(b"x-request-id", self.client.encode() or ours), (b"x-kvmesh-request-id", ours)]
        if self.path.startswith("/v1/messages"):
            # Where Anthropic's packages look for the name that their errors and answers show.
            headers.append((b"request-id", ours))
        if self.traceparent:
            headers.append((b"traceparent", self.traceparent.encode()))
        return headers

    def fields(self) -> dict[str, str]:
        fields = {
            "api_key": self.key,
            "x_request_id": self.client,
            "traceparent": self.traceparent,
            "path": self.path,
        }
        return {name: value for name, value in fields.items() if value}


UNNAMED: Final = RequestNames("")
"""The names of calls that no client made."""


def names_of(headers: Mapping[bytes, bytes], prefix: str = "req-", path: str = "") -> RequestNames:
    """A new id of ours that begins with `prefix`, and what the client calls its request for `path`."""
    client = headers.get(b"x-request-id", b"")[:MAX_CHARS].decode("latin-1")
    trace = headers.get(b"traceparent", b"")
    traceparent = trace.decode() if _TRACEPARENT.fullmatch(trace) else ""
    unread = "" if traceparent else _FOREIGN.sub("_", trace[:MAX_CHARS].decode("latin-1"))
    client, path = _FOREIGN.sub("_", client), _FOREIGN.sub("_", path[:MAX_CHARS])
    return RequestNames(prefix + os.urandom(16).hex(), client, traceparent, path, unread)
