"""How the KV cache of one model is laid out in memory: the shape that both ends of a transfer must agree on.

A pool is page-major, `[pages, layers, 2, page_size, kv_heads, head_dim]`: one page of all layers is one contiguous
block of bytes, so a page moves as one copy, and a layer's view is a stride. Page 0 is reserved for padding.
"""

import hashlib
from functools import lru_cache
from typing import Final

import msgspec

PADDING_PAGE: Final = 0
FORMAT_VERSION: Final = 1

ITEM_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of the KV pool of one tensor-parallel rank; two groups exchange pages only if their `digest` is equal.

    `fingerprint` names the weights (a hash of the model's configuration and of all bytes of its files), so pages of two
    models of one shape never mix. `total_kv_heads` is the model's number of KV heads if ranks share heads, 0 if not.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    page_size: int = 16
    tp_rank: int = 0
    tp_size: int = 1
    fingerprint: str = ""
    format_version: int = FORMAT_VERSION
    total_kv_heads: int = 0

    @property
    def model_kv_heads(self) -> int:
        return self.total_kv_heads or self.num_kv_heads * self.tp_size

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: `(layers, 2, page_size, kv_heads, head_dim)`."""
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    @property
    def digest(self) -> bytes:
        """16 bytes, equal exactly if the pages of two groups hold the same data, however ranks share the heads."""
        return _digest(self)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


# Kept: an agent compares it for each grant, and a process knows a few layouts.
@lru_cache(maxsize=64)
def _digest(layout: KVLayout) -> bytes:
    whole = msgspec.structs.replace(layout, num_kv_heads=layout.model_kv_heads, tp_rank=0, tp_size=1, total_kv_heads=0)
    return hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.astuple(whole)[:-1]), digest_size=16).digest()
