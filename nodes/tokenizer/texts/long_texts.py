"""Texts too long to be encoded on the event loop, each kind in a thread of its own. Used by `actor.py`.

Prompts are bounded by the model's context, but texts that are only counted (`/tokenize`) by the size of a body alone:
megabytes take seconds. In a single queue, all prompts behind such a text would wait for it.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nodes.tokenizer.errors import Overloaded

_Text = TypeVar("_Text")
_Result = TypeVar("_Result")


class LongTexts:
    """A queue of work, with at most `most` items running or waiting; without a thread it runs on the event loop."""

    def __init__(self, name: str, most: int, *, use_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(1, name) if use_thread else None
        self._name = name
        self._most = most
        self.num = 0

    async def encode(
        self, texts: Sequence[_Text], encode: Callable[[_Text], _Result], is_wanted: Callable[[], bool]
    ) -> list[_Result]:
        """Of each text (or pair) what `encode` makes of it; fewer if they are not wanted any more when it is their
        turn. Raises `Overloaded`.
        """
        if self.num >= self._most:
            raise Overloaded(f"{self.num} long texts are already queued to be {self._name}d; try again later")
        self.num += 1
        try:
            return await self.run(lambda: [encode(text) for text in texts if is_wanted()])
        finally:
            self.num -= 1

    async def run(self, work: Callable[[], _Result]) -> _Result:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
