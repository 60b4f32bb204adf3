"""Whose cached pages a request may meet: `cache_salt`, vLLM's name, and `extra_key`, SGLang's. Pure.

Two fields with two uses. A salt isolates: it is a secret of those who share pages. An extra key names a space of pages,
and is no secret: logs and events show it. So neither reaches the pages of the other, whatever its value, and both
together are a third space.
"""

from hashlib import blake2b
from typing import Annotated, Final

from msgspec import Meta

CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
"""Either of them. Empty is refused, not taken for none: a client whose secret is lost would share with everybody."""
_SALT_BYTES: Final = 16
"""As many as a page's hash has (`kvstore/hashing.py`): a longer one would tell no more pages apart."""


def scope_of(cache_salt: str | None, extra_key: str | None) -> str:
    """`extra_key` on the wire, equal exactly for equal pairs; empty for neither.

    A hash of the salt in hexadecimal, which has no colon, then a colon and the extra key as it is. Every peer that
    follows cache events sees it, so the salt itself does not leave the gateway: who has the hash cannot ask by it.
    """
    if cache_salt is None and extra_key is None:
        return ""
    salt = "" if cache_salt is None else _hashed(cache_salt)
    return f"{salt}:{extra_key or ''}"


def _hashed(salt: str) -> str:
    return blake2b(salt.encode(), digest_size=_SALT_BYTES, person=b"kvmesh-salt").hexdigest()
