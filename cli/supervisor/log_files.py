"""The log files of a mesh: bounded, with one predecessor each."""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Final

_CHECK_INTERVAL_S: Final = 10.0


class LogFiles:
    """Rotates what actors append to. They keep their descriptors, so a full file is copied and cut, not renamed."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    async def keep_small(self) -> None:
        """Check now and then, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            # A full disk is a reason to try again, not to stop.
            with contextlib.suppress(OSError):
                self.rotate()

    def rotate(self) -> list[Path]:
        """Move the content of files over the bound to `NAME.log.1`; which ones were."""
        full = [path for path in sorted(self._folder.glob("*.log")) if path.stat().st_size > self._max_bytes]
        for path in full:
            # Lines that come between copy and cut are lost: the price of descriptors that stay open.
            shutil.copyfile(path, path.with_name(path.name + ".1"))
            with path.open("r+b") as file:
                file.truncate(0)
        return full
