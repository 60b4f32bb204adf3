"""Runs when an interpreter starts: the worker's loader then finds a device on which the CPU computes."""

import importlib.abc
import importlib.util
import sys
import types
from typing import Any

_LOADER = "nodes.worker.cuda.load"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _LOADER:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.loader is not None
        execute = found.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            _patch(module)

        found.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return found


def _patch(load: Any) -> None:
    """Of torch's own, only what asks for the device; all that is ours runs as it is."""
    import ctypes

    import torch
    from cupy.cuda import runtime

    from nodes.worker.pool_view import PoolView

    def view(pages: Any, layout: Any) -> PoolView:
        memory = (ctypes.c_char * pages.num_bytes).from_address(pages.pointer)
        return PoolView(torch.frombuffer(memory, dtype=torch.uint8), layout)

    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda _device: None
    torch.cuda.current_stream = lambda _device=None: types.SimpleNamespace(cuda_stream=0)
    torch.cuda.mem_get_info = lambda _device=None: runtime.memGetInfo()
    load.view_device_pages = view
    load.measured_activation_bytes = lambda *_args: 0


sys.meta_path.insert(0, _Finder())
