"""Asks the driver for a device's memory by NVML: if the supervisor used CUDA, its children could not.

A CUDA context would also cost half a gigabyte of the device. Tested over stand-ins for NVML.
"""

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from cli.errors import BadConfig
from cli.plan.devices import DeviceMemory
from kvstore.pool.device import CPU, CUDA, cuda_ordinal

_TIMEOUT_S: Final = 20.0
"""A driver without persistence takes 1 to 3 s for each device that it wakes; one that hangs must not hang the start."""

Answer = TypeVar("Answer")


def ask_devices(names: str, environment: Mapping[str, str]) -> tuple[DeviceMemory, ...]:
    """Memory of the devices of a setting: none for `cpu`, all that are visible for `cuda`. Raises BadConfig."""
    if names == CPU:
        return ()
    if names == CUDA:
        ordinals = range(_num_visible(environment))
    else:
        ordinals = [cuda_ordinal(name) for name in names.split(",")]
        if len(set(ordinals)) < len(ordinals):
            raise BadConfig(f"--device {names} cannot be used", why="it names a device twice", do="name each once")
    return tuple(ask_device(ordinal, environment) for ordinal in ordinals)


def ask_device(ordinal: int, environment: Mapping[str, str]) -> DeviceMemory:
    """Memory of `cuda:ordinal`, as actors with this environment number devices. Raises BadConfig."""
    name = f"cuda:{ordinal}"
    wanted = device_id(ordinal, environment)

    def ask(nvml: Any) -> DeviceMemory:
        if wanted.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(wanted))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(wanted)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(name, int(memory.total), int(memory.free))

    return _ask(name, ask)


def device_id(ordinal: int, environment: Mapping[str, str]) -> str:
    """NVML's id of the device, as CUDA counts only those that CUDA_VISIBLE_DEVICES names. Raises BadConfig.

    Without that variable both count from 0; the orders differ only on hosts with devices of several kinds, unless
    CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(ordinal)
    names = _names(visible)
    if ordinal >= len(names):
        raise _unusable(f"cuda:{ordinal}", f"CUDA_VISIBLE_DEVICES is {visible!r}")
    return names[ordinal]


def _num_visible(environment: Mapping[str, str]) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    found = len(_names(visible)) if visible is not None else _ask(CUDA, lambda nvml: int(nvml.nvmlDeviceGetCount()))
    if not found:
        raise _unusable(CUDA, "no device is visible")
    return found


def _names(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip()]


def _ask(name: str, question: Callable[[Any], Answer]) -> Answer:
    """Ask NVML, which is shut down again afterwards; in a thread, because a driver that hangs must not hang `up`."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise _unusable(
            name, f"nvidia-ml-py cannot be imported ({error}): install kvmesh[cuda13] or [cuda12]"
        ) from None
    answers: list[Answer] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            nvml.nvmlInit()
            try:
                answers.append(question(nvml))
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="nvml", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    if thread.is_alive():
        raise _unusable(name, f"the NVIDIA driver does not answer within {_TIMEOUT_S:g} s")
    if errors:
        raise _unusable(name, f"NVML says: {errors[0]}") from errors[0]
    return answers[0]


def _unusable(name: str, why: str) -> BadConfig:
    return BadConfig(
        f"the device {name} cannot be used", why=why, do="`nvidia-smi -L` lists devices; --device cpu needs none"
    )
