"""A real disk that is slow for some processes: the kernel holds their reads and writes back (cgroup v1, `blkio`)."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_BLKIO: Final = Path("/sys/fs/cgroup/blkio")


class NoThrottle(Exception):
    """Nothing can be held back here; says why."""


class SlowDisk:
    """The disk below a directory, slow for the processes that are taken in."""

    def __init__(self, cgroup: Path, device: str) -> None:
        self._cgroup = cgroup
        self._device = device

    def limit(self, *, reads: int, writes: int) -> None:
        """Bytes a second of all taken in together; 0: as fast as the disk is. Raises NoThrottle."""
        try:
            for what, most in (("read", reads), ("write", writes)):
                (self._cgroup / f"blkio.throttle.{what}_bps_device").write_text(f"{self._device} {most}")
        except OSError as error:
            raise NoThrottle(f"the kernel does not hold back disk {self._device}: {error.strerror}") from error

    def take(self, pid: int) -> None:
        """All threads of a process, and children that it starts from now on."""
        (self._cgroup / "cgroup.procs").write_text(str(pid))


@contextmanager
def slow_disk(directory: Path) -> Generator[SlowDisk]:
    """Raises NoThrottle where only root could do this, or a kernel with cgroup v1's `blkio`."""
    cgroup = _BLKIO / f"slow-disk-{os.getpid()}"
    try:
        device = _device_of(directory)
        cgroup.mkdir()
    except OSError as error:
        raise NoThrottle(f"no disk can be made slow here: {error}") from error
    try:
        yield SlowDisk(cgroup, device)
    finally:
        # Who still lives goes on at the disk's own speed.
        for pid in (cgroup / "cgroup.procs").read_text().split():
            (_BLKIO / "cgroup.procs").write_text(pid)
        cgroup.rmdir()


def _device_of(directory: Path) -> str:
    """Major and minor number of the whole disk: partitions are refused. Raises OSError if it is on none."""
    number = directory.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    if (found / "partition").exists():
        found = found.parent
    return (found / "dev").read_text().strip()
