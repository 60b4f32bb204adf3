"""Device names, and the address and length of a pool's pages on a device; nothing that computes."""

import re
from typing import Final, NamedTuple

from kvstore.errors import DeviceUnavailable

CPU: Final = "cpu"
CUDA: Final = "cuda"

_CUDA_DEVICE: Final = re.compile(r"cuda(?::(\d{1,3}))?")


class DevicePages(NamedTuple):
    """The pages of a pool in device memory, page 0 first.

    `device` is the CUDA ordinal, `pointer` the device address in this process (another process has another one),
    `num_bytes` is `num_pages * layout.page_bytes`. Not owned: must not be used after the pool is closed.
    """

    device: int
    pointer: int
    num_bytes: int


def memory_kind(device: str) -> str:
    """The kind of memory that a device name means: `cpu` or `cuda`. Raises DeviceUnavailable for any other name."""
    if device == CPU:
        return CPU
    cuda_ordinal(device)
    return CUDA


def cuda_ordinal(device: str) -> int:
    """The ordinal in `cuda` (0) or `cuda:N`. Raises DeviceUnavailable for any other name."""
    match = _CUDA_DEVICE.fullmatch(device)
    if match is None:
        raise DeviceUnavailable(f"there is no device called {device!r}: give 'cpu' or 'cuda:N', as in 'cuda:0'")
    return int(match[1] or 0)
