"""What an installed store keeps for a page: 64 bytes that say which page it is, then its bytes at all ranks.

    offset  bytes  field, little-endian
    0       8      `KVPAGE` and the version
    8       16     digest of the identity: layout, numerics, bytes, ranks
    24      16     chained hash of the page
    40      8      checksum of all that is before it and of the page's data (`checksum.page_checksum`)
    48      16     0

The checksum binds name and data: without it, a value that is one page's up to byte 40 and another's from there on, as
half a write leaves it, would pass.

A store may hand out what it was never given: another page's value, half of one, nothing, bytes of another mesh whose
pages are computed otherwise. All of that is found here, and is a miss. It is no defence against somebody who writes
values on purpose. Pure.
"""

import struct
from collections.abc import Sequence
from typing import Final

from kvstore.store.checksum import page_checksum
from kvstore.store.files import Page
from kvstore.store.installed.identity import HEADER_BYTES, digest_of, value_bytes_of
from kvstore.store.place import StoreIdentity

_MAGIC: Final = b"KVPAGE\0\1"
_NAME: Final = struct.Struct("<8s16s16s")
_CHECKSUM: Final = struct.Struct("<Q")


class PageValues:
    """Makes values of the pages of one identity, and takes them apart again."""

    def __init__(self, identity: StoreIdentity) -> None:
        self._digest = digest_of(identity)
        self._page_bytes = identity.page_bytes
        self.value_bytes = value_bytes_of(identity)

    def seal(self, page_hash: bytes, page: Page) -> memoryview:
        """A copy of the page as a value, which nobody can write. Raises ValueError if the page's memory is gone."""
        value = bytearray(self.value_bytes)
        for part, there in zip(page, self._parts(value), strict=True):
            there[:] = part
        _NAME.pack_into(value, 0, _MAGIC, self._digest, page_hash)
        # Of the copy: the pool's page may be changing, which is found afterwards, but then by its generation.
        _CHECKSUM.pack_into(value, _NAME.size, self._checksum(value))
        return memoryview(value).toreadonly()

    def open(self, page_hash: bytes, value: bytes | bytearray | memoryview) -> Sequence[memoryview] | None:
        """A copy of the page's bytes, rank by rank; None if `value` is not this page's."""
        # A copy first: whoever filled the buffer may still write to it, also between a check and the use.
        whole = bytes(value)
        if len(whole) != self.value_bytes:
            return None
        if _NAME.unpack_from(whole) != (_MAGIC, self._digest, page_hash):
            return None
        return self._parts(whole) if _CHECKSUM.unpack_from(whole, _NAME.size) == (self._checksum(whole),) else None

    def _checksum(self, value: bytes | bytearray) -> int:
        return page_checksum([memoryview(value)[: _NAME.size], *self._parts(value)])

    def _parts(self, value: bytes | bytearray) -> list[memoryview]:
        view = memoryview(value)
        return [view[at : at + self._page_bytes] for at in range(HEADER_BYTES, len(view), self._page_bytes)]
