"""Weights whose device memory can be given back and taken again at the same addresses, by torch-memory-saver.

What is allocated inside `region` lies on pages of its own, mapped by cuMem*. `pause` copies them into pinned memory of
the host and frees them; `resume` maps others at the same addresses and copies back, so tensors stay as they were. Such
memory cannot be exported to other processes, so KV pools are never made inside.

`hook_mode="torch"` gives the region an allocator of torch's own kind (a `torch.cuda.MemPool`), and nothing has to be
preloaded into the process. The other mode, `preload`, could pause the memory of CUDA graphs too, but they are captured
again here anyway, since the pool's addresses change.

Written for version 0.0.10 (`region(tag, enable_cpu_backup)`, `pause(tag)`, `resume(tag)`). On an H100 weights came back
bit for bit at their addresses, and `pause` returned with at least 0.95 of their bytes free for other processes.
"""

import contextlib
import functools
import importlib
from collections.abc import Generator
from typing import Any, Final

from nodes.worker.errors import MemorySaverMissing

TAG: Final = "weights"


class MemorySaver:
    """The weights of one process. `saver` is the library's `torch_memory_saver` object."""

    def __init__(self, saver: Any) -> None:
        self._saver = saver

    @contextlib.contextmanager
    def region(self) -> Generator[None, None, None]:
        """A context in which this thread's allocations on the device can be paused later."""
        with self._saver.region(tag=TAG, enable_cpu_backup=True):
            yield

    def pause(self) -> None:
        """Free the device's memory, with a copy in the host's. Nothing may use it; nothing runs."""
        self._saver.pause(tag=TAG)

    def resume(self) -> None:
        """Take the memory back, with what was in it. Raises what the library raises if none is free."""
        self._saver.resume(tag=TAG)


@functools.cache
def load_memory_saver() -> MemorySaver:
    """The process's memory saver. Raises MemorySaverMissing if it is not installed or does not work here.

    The same one each time: the library refuses to have its mode set once it has been used.
    """
    try:
        module: Any = importlib.import_module("torch_memory_saver")
        saver = module.torch_memory_saver
        saver.hook_mode = "torch"
    # Its import loads a library over CUDA's, and raises whatever the loader does; the message says what to install.
    except Exception as error:
        raise MemorySaverMissing(
            f"torch-memory-saver cannot be used ({type(error).__name__}: {error}): install kvmesh with the extra cuda12"
            " or cuda13, or start without --memory-saver; `meshctl release --reload-weights` works without it"
        ) from error
    return MemorySaver(saver)
