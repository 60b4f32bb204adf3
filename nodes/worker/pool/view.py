"""A KV pool's bytes as tensors. The pool owns the memory; nothing here copies it."""

import warnings
from typing import Final

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from mesh.transport.base import Buffer

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PoolView:
    """`pages`: `[pages, layers, 2, page_size, kv_heads, head_dim]`, keys at index 0 of the third dimension.

    `cells` and `layer_pages` are the same memory: one token's keys or values of one layer per row, and one page's keys
    and values of one layer per row. Page p of layer l is row `p * num_layers + l` of `layer_pages`.
    """

    def __init__(self, memory: Buffer | Tensor, layout: KVLayout) -> None:
        """`memory` is the pool's pages as a buffer, or as a flat uint8 tensor on any device."""
        dtype = TORCH_DTYPES[layout.dtype]
        flat = memory.view(dtype) if isinstance(memory, Tensor) else _from_buffer(memory, dtype)
        self.layout = layout
        self.pages: Tensor = flat.view(-1, *layout.page_shape)
        width = layout.num_kv_heads * layout.head_dim
        self.cells: Tensor = flat.view(-1, width)
        self.layer_pages: Tensor = flat.view(-1, 2 * layout.page_size * width)


def _from_buffer(memory: Buffer, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():
        # torch warns about read-only buffers. A worker's pool never is one, but pools in tests are.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=dtype)
