"""`torch_memory_saver` on the software device: tensors of a region are cleared while they are paused, and come back.

Pauses and resumptions are written to `$SOFTWARE_DEVICE/saver.log`, a line each with the process. Like the library it
refuses what it cannot do: another hook mode, and pausing a tag that no region has.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode


class _Region(TorchFunctionMode):
    """Remembers what is made inside."""

    def __init__(self, made: list[torch.Tensor]) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self._made.append(result)
        return result


class _Saver:
    def __init__(self) -> None:
        self._hook_mode = "preload"
        self._is_used = False
        self._made: dict[str, list[torch.Tensor]] = {}
        self._backups: dict[str, list[torch.Tensor]] = {}

    @property
    def hook_mode(self) -> str:
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        # The library raises an AttributeError of its own.
        assert not self._is_used, "the mode cannot be set once it was used"
        self._hook_mode = mode

    @contextlib.contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Generator[None]:
        assert self.hook_mode == "torch", "nothing was preloaded"
        self._is_used = True
        assert enable_cpu_backup
        with _Region(self._made.setdefault(tag, [])):
            yield

    @torch.inference_mode()
    def pause(self, tag: str) -> None:
        assert tag not in self._backups, "paused twice"
        self._backups[tag] = [one.clone() for one in self._made[tag]]
        for one in self._made[tag]:
            one.zero_()
        _log("pause", tag)

    @torch.inference_mode()
    def resume(self, tag: str) -> None:
        for one, backup in zip(self._made[tag], self._backups.pop(tag), strict=True):
            one.copy_(backup)
        _log("resume", tag)


def _log(what: str, tag: str) -> None:
    with (Path(os.environ["SOFTWARE_DEVICE"]) / "saver.log").open("a") as file:
        file.write(f"{os.getpid()} {what} {tag}\n")


torch_memory_saver = _Saver()
