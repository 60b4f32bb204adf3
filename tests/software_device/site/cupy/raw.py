"""`cupy.RawKernel`: kvmesh's kernels by name, done in the stream in Python instead of from their source."""

import ctypes
from collections.abc import Callable
from typing import Any

from cupy.cuda import current_stream


def _gather(table: int, num_ranges: int, num_pieces: int) -> None:
    """Reads its table when it runs, as the kernel does."""
    words = (ctypes.c_uint64 * (4 * num_ranges + 1)).from_address(table)
    assert words[4 * num_ranges] == num_pieces
    for number in range(num_ranges):
        ctypes.memmove(words[number], words[num_ranges + number], words[2 * num_ranges + number])


_KERNELS: dict[str, Callable[..., None]] = {"kvmesh_gather": _gather}


class RawKernel:
    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        assert f"void {name}(" in code
        self._kernel = _KERNELS[name]

    def compile(self) -> None:
        pass

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        numbers = [int(one) for one in args]
        current_stream().put(lambda: self._kernel(*numbers))
