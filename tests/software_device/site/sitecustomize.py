"""Runs when an interpreter starts: the worker's loader then finds a device on which the CPU computes."""

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules of ours when they are loaded, as `_PATCHES` says."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        patch = _PATCHES.pop(name, None)
        if patch is None:
            return None
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.loader is not None
        execute = found.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            patch(module)

        found.loader.exec_module = execute_and_patch
        return found


class _TorchStream:
    """On the CPU torch's work is done when the call returns, so work that waits for it can be done at once."""

    def put(self, work: Callable[[], None]) -> None:
        work()


def _patch_torch(_module: Any) -> None:
    """Patch only what of torch asks for the device; all our own code runs as it is."""
    import torch
    from cupy.cuda import runtime

    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda _device: None
    torch.cuda.current_stream = lambda _device=None: types.SimpleNamespace(cuda_stream=0)
    torch.cuda.mem_get_info = lambda _device=None: runtime.memGetInfo()
    runtime.streams[0] = _TorchStream()


def _patch_loader(load: Any) -> None:
    import ctypes

    import torch

    from nodes.worker.pool.view import PoolView

    def view(pages: Any, layout: Any) -> PoolView:
        memory = (ctypes.c_char * pages.num_bytes).from_address(pages.pointer)
        return PoolView(torch.frombuffer(memory, dtype=torch.uint8), layout)

    _patch_torch(load)
    load.view_device_pages = view
    load.measured_activation_bytes = lambda *_args: 0


_PATCHES: dict[str, Callable[[Any], None]] = {
    "nodes.worker.cuda.load": _patch_loader,
    "nodes.worker.cuda.nccl_collectives": _patch_torch,
}
sys.meta_path.insert(0, _Finder())
