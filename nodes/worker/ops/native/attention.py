"""Paged attention of the native kernels: the arguments of one call in a program's list."""

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Final

MAX_HEAD_DIM: Final = 256
"""As in attention.h: the most that supported models have. A thread's scratch grows with it (562 KB)."""
MAX_BLOCK_ROWS: Final = 192
"""As in attention.h: query heads of all tokens of a block."""


class AttendCall(Structure):
    """`AttendCall` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cos", "sin", "pool")),
        *((name, c_int64) for name in ("page_bytes", "value_bytes")),
        *((name, c_void_p) for name in ("spans", "pages", "blocks")),
        *((name, c_int32) for name in ("num_blocks", "has_chunks", "page_size", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("window", "sees_all")),
        *((name, c_float) for name in ("eps", "scale")),
    )
