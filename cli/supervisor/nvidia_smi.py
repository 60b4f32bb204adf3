"""Asks the driver's own tool for a device's memory, because the supervisor must not touch CUDA: its children could not.

A CUDA context would cost the supervisor half a gigabyte of the device besides.
"""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from cli.errors import BadConfig
from cli.plan.devices import DeviceMemory
from kvstore.pool.device import CPU, CUDA, cuda_ordinal

COMMAND: Final = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S: Final = 20.0
_MIB: Final = 1 << 20


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


def _num_visible(environment: Mapping[str, str]) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = len([name for name in visible.split(",") if name.strip()])
    else:
        found = len(_run(CUDA, COMMAND).strip().splitlines())
    if not found:
        raise _unusable(CUDA, "no device is visible")
    return found


def ask_device(ordinal: int, environment: Mapping[str, str]) -> DeviceMemory:
    """Memory of `cuda:ordinal`, as actors with this environment number devices. Raises BadConfig."""
    name = f"cuda:{ordinal}"
    return parse_memory(name, _run(name, [*COMMAND, "-i", device_id(ordinal, environment)]))


def _run(name: str, words: Sequence[str]) -> str:
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise _unusable(name, "there is no nvidia-smi on the PATH, so there is no NVIDIA driver") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unusable(name, f"nvidia-smi does not answer: {error}") from error
    if asked.returncode:
        raise _unusable(name, f"nvidia-smi says: {' '.join((asked.stdout + asked.stderr).split())}")
    return asked.stdout


def device_id(ordinal: int, environment: Mapping[str, str]) -> str:
    """What nvidia-smi calls the device: CUDA counts those that CUDA_VISIBLE_DEVICES names. Raises BadConfig.

    Without that variable both count from 0; the orders differ only on hosts with devices of several kinds, unless
    CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(ordinal)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if ordinal >= len(names):
        raise _unusable(f"cuda:{ordinal}", f"CUDA_VISIBLE_DEVICES is {visible!r}")
    return names[ordinal]


def parse_memory(name: str, text: str) -> DeviceMemory:
    """What nvidia-smi answered for one device: total and free MiB. Raises BadConfig."""
    try:
        total, free = (int(number) for number in text.strip().split(","))
    except ValueError:
        raise _unusable(
            name, f"nvidia-smi answered {text.strip()[:200]!r} where two numbers of MiB were to be"
        ) from None
    return DeviceMemory(name, total * _MIB, free * _MIB)


def _unusable(name: str, why: str) -> BadConfig:
    return BadConfig(
        f"the device {name} cannot be used", why=why, do="`nvidia-smi -L` lists devices; --device cpu does without"
    )
