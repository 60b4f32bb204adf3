"""How far a download is: one line that is overwritten on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable
from typing import Final

from cli.supervisor.told.progress import Progress
from nodes.sizes import progress_text, size_text

_WIDTH: Final = 24
_TERMINAL_S: Final = 0.1
"""Ten updates a second look smooth; pieces arrive by the thousand."""
_PLAIN_S: Final = 10.0
"""Lines of a log: six a minute show that it goes on."""
_RATE_AFTER_S: Final = 1.0
"""Before that the rate is one of setting up connections, and what is left would be far off."""
_CLEAR_TO_END: Final = "\x1b[K"


class DownloadBar:
    """The download of `total_bytes` of `what`; `now` is a clock in seconds."""

    def __init__(
        self, progress: Progress, what: str, total_bytes: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._what = what
        self._total = total_bytes
        self._now = now
        self._began = self._said = now()
        self._done = 0
        if not progress.is_terminal:
            progress.note(f"fetching {what}: {size_text(total_bytes)}")

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` have arrived; a negative number has to be fetched again."""
        self._done += num_bytes
        now = self._now()
        if now - self._said < (_TERMINAL_S if self._progress.is_terminal else _PLAIN_S):
            return
        self._said = now
        self._show(now)

    def close(self) -> None:
        self._show(self._now(), end="\n")

    def _show(self, now: float, end: str = "") -> None:
        text = bar_text(self._what, self._done, self._total, now - self._began)
        if self._progress.is_terminal:
            self._progress.write(f"\r{text}{_CLEAR_TO_END}{end}")
        else:
            self._progress.note(text)


def bar_text(what: str, done: int, total: int, elapsed_s: float) -> str:
    """`org/name [######------] 1.2 of 3.1 GB, 45.0 MB/s, 42 s left`."""
    share = min(done / total, 1.0) if total else 1.0
    filled = int(_WIDTH * share)
    text = f"{what} [{'#' * filled}{'-' * (_WIDTH - filled)}] {progress_text(done, total)}"
    if elapsed_s < _RATE_AFTER_S or done <= 0:
        return text
    rate = done / elapsed_s
    left = f", {(total - done) / rate:.0f} s left" if done < total else ""
    return f"{text}, {size_text(int(rate))}/s{left}"
