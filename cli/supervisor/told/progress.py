"""What `meshctl up` says while it works: a line per actor when it is ready, and whatever goes wrong. All on stderr.

With `-d` the lines go through a pipe to the process that the user waits for.
"""

import itertools
import os
import time
from typing import Final

READY_MARK: Final = "\x00ready\n"
"""Follows the ready text on a pipe, for the process that waits for it."""

WORK_LINE_S: Final = 3.0
"""The time between two lines about how far one actor is, and before the first."""


class Progress:
    """Writes lines to a descriptor, or nowhere. It is no error if nobody listens any more (a closed terminal).

    `is_terminal`: a terminal shows the lines, if need be at the pipe's other end, so that lines can be overwritten.
    """

    def __init__(
        self, descriptor: int | None, began: float | None = None, *, is_pipe: bool = False, is_terminal: bool = False
    ) -> None:
        self._descriptor = descriptor
        self._is_pipe = is_pipe
        self.is_terminal = is_terminal
        self._began = time.monotonic() if began is None else began
        self._stages: dict[str, list[tuple[str, float]]] = {}
        self._work: dict[str, tuple[str, float]] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def line(self, text: str) -> None:
        self.write(f"{text}\n")

    def note(self, text: str) -> None:
        self.line(f"{self.elapsed_s:7.2f} s  {text}")

    def stage(self, actor_id: str, stage: str) -> None:
        """An actor has reached `spawn`, `hello` or `ready`; the last one prints its line."""
        stages = self._stages.setdefault(actor_id, [])
        if stage == "spawn":
            stages.clear()
        if any(name == stage for name, _ in stages):
            return
        stages.append((stage, self.elapsed_s))
        if stage == "ready":
            names = {"hello": "spawn to hello", "ready": "load"}
            spent = [f"{names[name]} {at - before:.2f} s" for (_, before), (name, at) in itertools.pairwise(stages)]
            self.note(f"{actor_id:<22} ready   {', '.join(spent)}")
            del self._stages[actor_id]

    def working(self, actor_id: str, text: str) -> None:
        """An actor says how far it is: a line now and then, for people who wait; none for work that is done at once."""
        said, at = self._work.setdefault(actor_id, ("", self.elapsed_s))
        if not text:
            del self._work[actor_id]
        elif text != said and self.elapsed_s - at >= WORK_LINE_S:
            self._work[actor_id] = text, self.elapsed_s
            self.note(f"{actor_id:<22} {text}")

    def ready(self, text: str) -> None:
        """The mesh serves; on a pipe this is the last output."""
        self.line("\n" + text)
        if self._is_pipe:
            self.write(READY_MARK)
            self._close()

    def write(self, text: str) -> None:
        if self._descriptor is None:
            return
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self._close()

    def _close(self) -> None:
        if self._is_pipe and self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
