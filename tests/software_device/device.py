"""What a process needs in its environment to see software devices."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def environment(directory: Path, *, num_devices: int = 1, num_bytes: int = 1 << 30) -> dict[str, str]:
    """Variables for processes that share `num_devices` devices of `num_bytes` each, whose memory is in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    site = str(HERE / "site")
    return {
        "SOFTWARE_DEVICE": str(directory),
        "SOFTWARE_DEVICE_BYTES": str(num_bytes),
        "SOFTWARE_DEVICES": str(num_devices),
        "PYTHONPATH": os.pathsep.join(part for part in (site, os.environ.get("PYTHONPATH", "")) if part),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }


def bytes_in_use(directory: Path) -> int:
    """Bytes that living processes map, on all devices."""
    import fcntl

    total = 0
    for path in directory.glob("[0-9]*-*"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                total += path.stat().st_size
    return total
