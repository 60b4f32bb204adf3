"""The first 4096 bytes of a pool's file: what it holds and where.

    8 bytes   magic
    4 bytes   format version, little-endian like the two that follow
    4 bytes   length of the body
    4 bytes   CRC-32 of the body
    body      MessagePack of `PoolInfo`

Written and read by the hosts of `page_pool.py`.
"""

import struct
import zlib
from typing import Final

import msgspec

from kvstore.cache.page_table import PageTable
from kvstore.errors import PoolForeign, PoolMismatch, PoolTorn
from kvstore.layout import FORMAT_VERSION, ITEM_BYTES, KVLayout
from kvstore.pool.device import CPU

MAGIC: Final = b"KVMESHPL"
ALIGNMENT: Final = 4096
HEADER_BYTES: Final = 4096
"""One page of the processor's memory, so that what follows can be mapped by itself; a header takes some 300 bytes."""

_EPOCH_BITS: Final = 44

_PREFIX: Final = struct.Struct("<8sIII")


def incarnation_of(epoch: int, number: int = 0) -> int:
    """A pool's incarnation: the `number`-th after the one with which the agent of this epoch started."""
    return epoch + (number << _EPOCH_BITS)


def is_later(incarnation: int, than: int) -> bool:
    """Whether `incarnation` of a group's pool was made after `than`."""
    return _in_order(incarnation) > _in_order(than)


def _in_order(incarnation: int) -> tuple[int, int]:
    return incarnation & ((1 << _EPOCH_BITS) - 1), incarnation >> _EPOCH_BITS


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The header's content. Pages of another `incarnation` of the pool are different pages.

    `device` is where the pages are, `cpu` (in the file) or `cuda:N`. On a device, `ipc_handle` is the 64 bytes of the
    cudaIpcMemHandle of their allocation, which begins with page 0.

    The other fields say what an operator has had released, and outlive every process. While `weights` is not empty
    (`keep`, `backup`, `reload`: how the weights of the group's workers are released), nobody may map the pool.
    `is_unwanted`: its pages are to be freed once nobody uses them. `is_freed`: they have been, and the file ends after
    this header.
    """

    group: str
    num_pages: int
    layout: KVLayout
    incarnation: int
    device: str = CPU
    ipc_handle: bytes = b""
    weights: str = ""
    is_unwanted: bool = False
    is_freed: bool = False

    @property
    def is_released(self) -> bool:
        return bool(self.weights)

    @property
    def table_offset(self) -> int:
        return HEADER_BYTES

    @property
    def pages_offset(self) -> int:
        table_bytes = PageTable.num_bytes(self.num_pages, self.layout.page_size)
        return HEADER_BYTES + -(-table_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def pages_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole segment: without pages if they are on a device, only the header if it is freed."""
        if self.is_freed:
            return HEADER_BYTES
        return self.pages_offset + (self.pages_bytes if self.device == CPU else 0)


HANDLE_FIELDS: Final = ("group", "num_pages", "layout", "incarnation", "device")
"""Fields of a header that its agent tells others (`PoolHandle`), and that must be the same when they map the pool."""


def encode_header(info: PoolInfo) -> bytes:
    """The header's bytes. Raises PoolMismatch if names or fingerprint are too long for it."""
    body = msgspec.msgpack.encode(info)
    if len(body) > HEADER_BYTES - _PREFIX.size:
        raise PoolMismatch(
            f"the header of pool {info.group[:40]!r} has {len(body)} bytes, but at most "
            f"{HEADER_BYTES - _PREFIX.size} fit; shorten its names"
        )
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(body), zlib.crc32(body))
    return (prefix + body).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes, path: str, file_bytes: int) -> PoolInfo:
    """Read a header and check it against the segment's size. Raises PoolForeign or PoolTorn."""
    # Format (magic, version) is checked before content, so that the message names the first thing that is wrong.
    if len(data) < HEADER_BYTES:
        raise PoolTorn(f"{path} has {file_bytes} bytes, less than a header: its creation was interrupted; remove it")
    magic, version, length, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise PoolForeign(f"{path} is not a KV pool: it begins with {magic!r}; choose another name or remove it")
    if version != FORMAT_VERSION:
        raise PoolForeign(
            f"{path} is a KV pool of format {version}, but this version reads format {FORMAT_VERSION}; remove it"
        )
    body = data[_PREFIX.size : _PREFIX.size + length]
    if length > HEADER_BYTES - _PREFIX.size or zlib.crc32(body) != crc:
        raise PoolTorn(f"the header of {path} is damaged (checksum): remove it; the pool then starts empty")
    try:
        info = msgspec.msgpack.decode(body, type=PoolInfo)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PoolTorn(f"the header of {path} cannot be read ({error}): remove it") from None
    # The checksum is right, but sizes are computed from these fields: a division by zero would not name the file.
    if info.num_pages < 2 or info.layout.page_size < 1 or info.layout.dtype not in ITEM_BYTES:
        raise PoolTorn(f"the header of {path} describes no pool ({info}): remove it")
    # Mapping a file beyond its end means a SIGBUS at the first touch, which nothing can catch.
    if file_bytes < info.file_bytes:
        raise PoolTorn(f"{path} has {file_bytes} bytes, but its header says {info.file_bytes}: remove it")
    return info
