"""A KV pool's pages in a CUDA device's memory as tensors. The pool owns the memory; nothing here copies or frees it.

torch takes any object with `__cuda_array_interface__` (version 3, Numba's and CuPy's protocol) without copying, so that
neither CuPy nor DLPack is needed here. It is given bytes, because the protocol has no name for bfloat16.
"""

from typing import Any

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from kvstore.pool.device import DevicePages
from nodes.worker.errors import DeviceUnfit
from nodes.worker.pool.view import PoolView


class _CudaBytes:
    """`num_bytes` at `pointer`, as an object with the array interface."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
        }


def view_device_pages(pages: DevicePages, layout: KVLayout) -> PoolView:
    """A `PoolView` of `pages`. The mapping must stay open for as long as any of its tensors is used.

    Raises DeviceUnfit if the bytes are not whole pages, or if torch could not see the memory in place.
    """
    if pages.num_bytes % layout.page_bytes:
        raise DeviceUnfit(
            f"the pool on cuda:{pages.device} has {pages.num_bytes} bytes, not a multiple of a page's"
            f" {layout.page_bytes}: worker and kv_agent are of different versions; start both from the same"
        )
    torch.cuda.init()
    return PoolView(_in_place(bytes_at(pages.pointer, pages.num_bytes, pages.device), pages), layout)


def bytes_at(pointer: int, num_bytes: int, device: int) -> Tensor:
    """Memory of a device as a tensor of bytes, which does not hold it."""
    return torch.as_tensor(_CudaBytes(pointer, num_bytes), device=f"cuda:{device}")


def _in_place(tensor: Tensor, pages: DevicePages) -> Tensor:
    # `as_tensor` copies silently if the memory is on another device: a worker would then compute on a copy.
    if tensor.data_ptr() != pages.pointer or tensor.device.index != pages.device:
        raise DeviceUnfit(
            f"torch sees the pool's memory at {tensor.data_ptr():#x} on {tensor.device}, not at {pages.pointer:#x}"
            f" on cuda:{pages.device}: give kv_agent and worker the same CUDA_VISIBLE_DEVICES"
        )
    return tensor
