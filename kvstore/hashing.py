"""Chained content hashes: a page's hash names its tokens and everything before them.

`hash(page) = blake2b(parent hash + the page's token ids as little-endian u32)`, 16 bytes. The first page's parent is a
root hash of what else says whose pages may meet: the extra key of a request. Equal hashes therefore mean equal KV,
in any pool of one layout. Used by the prefix cache, routing and everything that follows cache events.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

HASH_BYTES: Final = 16
"""BLAKE2b with 128 bits: among 2**40 pages two are alike with a chance of 2**-49. A page's table entry has two."""
TOKEN_BYTES: Final = 4
"""A token id is hashed and stored as u32; models' ids are below 2**31."""
NO_HASH: Final = bytes(HASH_BYTES)
_IS_LITTLE_ENDIAN: Final = sys.byteorder == "little"

_PERSON_ROOT: Final = b"kvmesh-root"
_PAGE: Final = hashlib.blake2b(digest_size=HASH_BYTES, person=b"kvmesh-page")


@lru_cache(maxsize=1024)
def root_hash(extra_key: str = "") -> bytes:
    """Parent of a first page, 16 bytes: the only thing beside tokens that tells prefixes of one pool apart.

    Pools of other weights have another layout (`KVLayout.fingerprint`), so nothing of the weights is in it.
    """
    data = extra_key.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=_PERSON_ROOT)
    digest.update(len(data).to_bytes(8, "little") + data)
    # The lengths of two more fields, a LoRA adapter and a version of the weights, which no release has set: without
    # them the pools and tokenizers of other releases would have other roots.
    digest.update(bytes(16))
    return digest.digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, as hashed and stored. Raises ValueError for an id outside 0 .. 2**32 - 1."""
    # A scheduler's own form of them. As their bytes it costs a twentieth of unpacking each id; an id that is negative
    # has its highest bit set, which is no ASCII.
    if isinstance(token_ids, array) and token_ids.typecode == "i" and _IS_LITTLE_ENDIAN:
        packed = token_ids.tobytes()
        if packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            return packed
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers from 0 to 4294967295: {error}") from None


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The ids packed by `pack_tokens`. Raises struct.error unless `packed` is a multiple of 4 bytes."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def page_hash(parent: bytes, packed_tokens: bytes) -> bytes:
    """Hash of a full page whose tokens are packed by `pack_tokens`, 16 bytes."""
    return content_hash(parent + packed_tokens)


def content_hash(content: bytes) -> bytes:
    """Hash of a full page, 16 bytes: `content` is its parent's hash, then its tokens, as a page table stores them."""
    # Copying costs half as much as making one, which has to parse its keywords.
    digest = _PAGE.copy()
    digest.update(content)
    return digest.digest()


def chain_hashes(root: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Hashes, 16 bytes each, of all full pages of `token_ids`; a partial last page has none."""
    return chain_packed(root, pack_tokens(token_ids), page_size)


def chain_packed(parent: bytes, packed_tokens: bytes, page_size: int) -> list[bytes]:
    """As `chain_hashes`, of tokens packed by `pack_tokens` that continue a page whose hash is `parent`."""
    stride = page_size * TOKEN_BYTES
    hashes: list[bytes] = []
    for start in range(0, len(packed_tokens) - stride + 1, stride):
        # Not by `page_hash`: its two calls cost as much as the digest.
        digest = _PAGE.copy()
        digest.update(parent + packed_tokens[start : start + stride])
        parent = digest.digest()
        hashes.append(parent)
    return hashes


def split_hashes(joined: bytes) -> list[bytes]:
    """Hashes that came one after the other, of 16 bytes each; what is left over of one names no page."""
    return [joined[end - HASH_BYTES : end] for end in range(HASH_BYTES, len(joined) + 1, HASH_BYTES)]
