"""The keys of a server's clients, as a file of hashes says them. Pure.

    # name  SHA-256 of the key                                                 at work at once, over all gateways
    alice   5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8   requests=8 tokens=100000
    paid    2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae   weight=4
    trainer 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08   admin

Whoever reads the file learns no key. Made by `meshctl keys api`, read by gateways.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from mesh.errors import MeshError

MAX_KEYS: Final = 10_000
"""A megabyte of lines. A gateway finds a key in one look, however many there are."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")
_ADMIN: Final = "admin"
_LIMIT: Final = re.compile(r"(requests|tokens)=([1-9][0-9]{0,11})|(weight)=(1000|[1-9][0-9]{0,2})")


class BadApiKeys(MeshError, code="bad_api_keys"):
    """Keys that cannot be used; says where and why, never what a line or a key has in it."""


class ApiKey(msgspec.Struct, frozen=True):
    """One client's key: its name in logs and answers, the SHA-256 of what the client sends, and its limits.

    `requests` and `tokens` may be at work at once, over all gateways of the mesh; 0: no limit. Where clients wait for
    each other, this one's part is `weight` (to 1000) times that of a client of weight 1. An `admin` may change
    the mesh for everybody, at a gateway with `--control`.
    """

    name: str
    sha256: bytes
    requests: int = 0
    tokens: int = 0
    admin: bool = False
    weight: int = 1

    def line(self) -> str:
        """The line of the file, without its end."""
        limits = [f"{name}={most}" for name, most in (("requests", self.requests), ("tokens", self.tokens)) if most]
        limits += [f"weight={self.weight}"] * (self.weight != 1)
        return " ".join([self.name, self.sha256.hex(), *limits, *([_ADMIN] if self.admin else [])])


def sha256_of(key: str | bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def new_key() -> str:
    """A key that nobody guesses: 256 random bits. Some clients refuse keys that do not begin with `sk-`."""
    return f"sk-{secrets.token_urlsafe(32)}"


def check_name(name: str, where: str = "") -> None:
    """Raises BadApiKeys, whose message begins with `where`."""
    if not _NAME.fullmatch(name):
        rule = "a key's name has 1 to 64 letters, digits and `_.@-`, and begins with a letter or a digit"
        raise BadApiKeys(f"{where}{rule}")


def read_lines(text: str) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises BadApiKeys for a line that is not one, a name or key given twice, or no key at all."""
    lines = {number: line.partition("#")[0].split() for number, line in enumerate(text.splitlines(), 1)}
    return _checked("line", {number: _read_line(words, number) for number, words in lines.items() if words})


def _read_line(words: list[str], number: int) -> ApiKey:
    check_name(words[0], f"line {number}: ")
    if len(words) < 2 or not _SHA256.fullmatch(words[1]):
        raise BadApiKeys(
            f"line {number} must be a name and the SHA-256 of a key in 64 hexadecimal digits; "
            "`meshctl keys api NAME` makes such a line"
        )
    limits: dict[str, int] = {}
    is_admin = False
    for word in words[2:]:
        limit = _LIMIT.fullmatch(word)
        if word == _ADMIN and not is_admin:
            is_admin = True
        elif limit is None or (limit[1] or limit[3]) in limits:
            raise BadApiKeys(
                f"line {number}: after the SHA-256 there may be requests=N and tokens=N, N from 1, weight=N, N from"
                " 1 to 1000, and admin"
            )
        else:
            limits[limit[1] or limit[3]] = int(limit[2] or limit[4])
    return ApiKey(words[0], bytes.fromhex(words[1]), **limits, admin=is_admin)


def read_plain(text: str) -> tuple[ApiKey, ...]:
    """Keys themselves, as `KVMESH_API_KEYS` has them: `NAME:KEY`, `KEY`, or `admin=NAME:KEY`, with commas or spaces
    between them.

    A key without a name is called `key-N` after its place. Raises BadApiKeys.
    """
    found: dict[int, ApiKey] = {}
    for number, word in enumerate(re.split(r"[,\s]+", text.strip(", \t\r\n")), 1):
        name, separator, key = word.partition(":")
        # No name has `=` in it.
        is_admin = bool(separator) and name.startswith(f"{_ADMIN}=")
        name = name.removeprefix(f"{_ADMIN}=") if is_admin else name
        if not separator:
            name, key = f"key-{number}", word
        if not key:
            raise BadApiKeys(f"entry {number} has no key" if word else "there is no key in it")
        check_name(name, f"entry {number}: ")
        found[number] = ApiKey(name, sha256_of(key), admin=is_admin)
    return _checked("entry", found)


def _checked(place: str, found: Mapping[int, ApiKey]) -> tuple[ApiKey, ...]:
    """The keys, by the number of the line or entry that each was in. Raises BadApiKeys."""
    if not found:
        # Taken for no keys at all, an emptied file would let everybody in.
        raise BadApiKeys("there is no key in it")
    if len(found) > MAX_KEYS:
        raise BadApiKeys(f"there are {len(found):,} keys in it, more than {MAX_KEYS:,}")
    places: dict[str | bytes, int] = {}
    for number, key in found.items():
        for what, value in (("name", key.name), ("key", key.sha256)):
            if (first := places.setdefault(value, number)) != number:
                raise BadApiKeys(f"{place} {number} has the same {what} as {place} {first}")
    return tuple(found.values())


def as_lines(keys: Iterable[ApiKey]) -> str:
    return "".join(f"{key.line()}\n" for key in keys)


def digest_of(keys: Collection[ApiKey]) -> str:
    """Equal for files that say the same in whatever order and spacing."""
    return hashlib.sha256("\n".join(sorted(key.line() for key in keys)).encode()).hexdigest()[:16]


class KeyTable:
    """Finds the key that a client sends, in a time that says nothing of the keys that there are."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        # Looked up under a secret of this process: who times answers cannot tell how much of a hash was right, since
        # what is compared in the look-up is nothing that a client could choose or know.
        self._secret = secrets.token_bytes(32)
        self._keys = {self._tag(key.sha256): key for key in keys}

    def find(self, sent: bytes) -> ApiKey | None:
        sha256 = sha256_of(sent)
        key = self._keys.get(self._tag(sha256))
        return key if key is not None and hmac.compare_digest(key.sha256, sha256) else None

    def _tag(self, sha256: bytes) -> bytes:
        return hashlib.blake2b(sha256, key=self._secret, digest_size=16).digest()
