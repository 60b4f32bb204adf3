"""Whether a request brings one of the API keys in force, and whose: called by `endpoint.py` before a route's handler.

A key comes as `Authorization: Bearer KEY` (OpenAI's clients) or as `x-api-key: KEY` (Anthropic's). What was sent is
neither logged nor quoted in an answer, right or wrong.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mesh.actor import Context
from nodes.api_keys.entries import ApiKey
from nodes.api_keys.file import KeyFile
from nodes.gateway.errors import Unauthorized

_LOOK_S: Final = 1.0
"""A revoked key is refused a second later; a look costs a `stat`."""

_TELL_AGAIN_S: Final = 60.0
"""A client may try again a thousand times a second."""


class Authorization:
    """The keys of one gateway, kept up to date from their file. Raises BadApiKeys if it cannot be used at first."""

    def __init__(self, path: Path, ctx: Context) -> None:
        self._file = KeyFile(path)
        self._ctx = ctx
        self._told: dict[str, float] = {}

    def start(self) -> None:
        """Announce which keys these are, and read the file again whenever it has changed."""
        self._tell()
        self._ctx.later(_LOOK_S, self._look)

    def key_of(self, headers: Mapping[bytes, bytes]) -> ApiKey:
        """Whose key a request brings. Raises Unauthorized."""
        sent = [key for key in (_bearer(headers), headers.get(b"x-api-key", b"").strip()) if key]
        # Some clients send both, one of them for another server.
        for one in sent:
            if (key := self._file.find(one)) is not None:
                return key
        for one in sent:
            self._tell_revoked(self._file.revoked(one))
        if sent:
            raise Unauthorized("The API key is not one of this server's.")
        raise Unauthorized(
            "This server needs an API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        )

    def _tell_revoked(self, name: str) -> None:
        """Its client does not know yet, and asks the operator why all is refused."""
        if name and self._told.get(name, 0.0) <= self._ctx.now():
            self._told[name] = self._ctx.now() + _TELL_AGAIN_S
            self._ctx.log.warning(
                "revoked_key", api_key=name, why="it is not in the file of API keys any more", then="401"
            )

    def _look(self) -> None:
        self._ctx.later(_LOOK_S, self._look)
        if not self._file.poll():
            return
        self._tell()
        if self._file.trouble:
            self._ctx.log.warning("api_keys_unread", why=self._file.trouble, then="the keys read before stay in force")
        else:
            self._ctx.log.info("api_keys_read", num=self._file.num_keys, digest=self._file.digest)

    def _tell(self) -> None:
        self._ctx.announce(api_keys=self._file.digest, api_keys_trouble=self._file.trouble)


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
