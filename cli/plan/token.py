"""The token with which a machine joins a mesh whose topology file does not name it: one word to copy. Pure.

    kvmesh1.BASE64URL    of a msgpack array (mesh, address, port, host, public key) and 4 bytes of its BLAKE2b

It says where the registry is and which key identifies it. It is no secret: the registry's list decides who may join.
"""

import base64
import binascii
import hashlib
from typing import Final

import msgspec

from cli.errors import BadConfig
from cli.plan.hosts import Address, HostName
from cli.plan.settings import Name, PortOfTwo

_PREFIX: Final = "kvmesh1."
_CHECK_BYTES: Final = 4
"""One mistyped token in four billion passes, and it is still short. They need not resist forgery."""
_MAX_CHARS: Final = 1024
"""About 140 with an IP address, 466 with the longest names: what is longer is something else that was pasted."""


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """The mesh `mesh`, whose registry is on `host` and dialed at `address` and `port`. `public_key` is that host's, ""
    if links are plain.
    """

    mesh: Name
    address: Address
    port: PortOfTwo
    host: HostName
    public_key: str = ""

    def text(self) -> str:
        content = msgspec.msgpack.encode(self)
        return _PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")


def parse_token(text: str) -> JoinToken:
    """Decode a token. Raises BadConfig if it was cut short or mistyped, or is of another version."""
    text = text.strip()
    version, dot, body = text.partition(".")
    if not dot or not version.startswith("kvmesh") or len(text) > _MAX_CHARS:
        raise _bad("it does not begin with kvmesh1., or is too long")
    if f"{version}." != _PREFIX:
        raise _bad(f"it is of version {version}, but this release only knows {_PREFIX[:-1]}")
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad("it was cut short or mistyped") from error
    content, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if _check(content) != check:
        raise _bad("it was cut short or mistyped")
    try:
        return msgspec.msgpack.decode(content, type=JoinToken)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _bad(f"its content cannot be used: {error}") from error


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()


def _bad(why: str) -> BadConfig:
    return BadConfig(
        "the token of --join cannot be used",
        why=why,
        do="copy all of what `meshctl keys token` prints on the registry's host",
    )
