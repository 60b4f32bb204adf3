"""Checks what requests ask of their draws before it is served: a schema, an expression, a grammar.

Compiling one may take all time or memory, and crash; a child process does it, which is not the one that renders chats.
What has passed is remembered, since agents send the same few again and again; so is, for a while, what has killed a
child: else clients that try again would have everybody else wait. While one child is at work, another takes the next.
"""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakValueDictionary

from nodes.asks import InvalidAsk, check_asks, field_of
from nodes.request import Asked
from nodes.tokenizer.child.bounded_child import BoundedChild
from nodes.tokenizer.child.protocol import AsksToCheck, Setup, frame
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import ERRORS_BY_CODE, InvalidValue, Overloaded, PrepareError

_MAX_REMEMBERED: Final = 4096
"""Digests of 16 bytes."""
_MAX_CHARS: Final = 16_384
"""Of notes: a line for each kind of keyword that is ignored."""
_FATAL_S: Final = 60.0
"""A check that is refused without a try: one that a busy machine made too slow is tried again soon enough, and one that
always kills its child takes `RenderingLimits.deadline_s` of a child in each of these."""
_NUM_CHILDREN: Final = 2
"""One that is taken up to its deadline leaves one for the others. Each that has been needed holds some 40 MB."""


_WORK: Final = "checks schemas"


class AskChecks:
    """Checks of one tokenizer. `use_process` false: where it is called, for the simulation.

    `tell` gets what of an ask will be ignored, once for each value.
    """

    def __init__(self, limits: RenderingLimits, tell: Callable[[str], None], *, use_process: bool) -> None:
        setup = Setup(
            template=None,
            special_tokens={},
            max_chars=0,
            memory_bytes=limits.memory_bytes,
            parent_pid=os.getpid(),
            checks_asks=True,
        )
        num = _NUM_CHILDREN if use_process else 0
        self.children = [BoundedChild(setup, limits, InvalidValue, _WORK) for _ in range(num)]
        self._free = [*self.children]
        # As many at a time as there are children; each has one for at most its start and `deadline_s`.
        self._turn = asyncio.Semaphore(num)
        self._num_waiting = 0
        self._max_waiting = limits.max_waiting
        self._tell = tell
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._fatal: OrderedDict[bytes, tuple[float, str, str | None]] = OrderedDict()
        """Of what killed a child: until when it is refused, with which words and parameter; the oldest first."""
        self._alike = WeakValueDictionary[bytes, asyncio.Lock]()
        """Held while one of these is checked, which takes two children's deadlines at most."""

    @property
    def num_killed(self) -> int:
        """Children that were killed, or died, in the middle of a check."""
        return sum(child.num_killed for child in self.children)

    def have_passed(self, asks: Sequence[Asked]) -> bool:
        """Whether all of them have been checked before."""
        return all(_digest(one) in self._passed for one in asks)

    async def check(self, asks: Sequence[Asked]) -> None:
        """Raises PrepareError: InvalidValue, UnsupportedSchema, Overloaded."""
        for one in asks:
            digest = _digest(one)
            if digest in self._passed:
                self._passed.move_to_end(digest)
                continue
            # Refused at once: each that waits may add `deadline_s` for those behind it.
            if self._num_waiting >= self._max_waiting:
                raise Overloaded(f"{self._num_waiting} others wait for the processes that {_WORK}; try again later")
            self._num_waiting += 1
            try:
                # Of several alike one is checked. The others wait for what becomes of it, and leave a child free.
                async with self._alike.setdefault(digest, asyncio.Lock()):
                    if digest not in self._passed:
                        await self._check_now(one, digest)
            finally:
                self._num_waiting -= 1

    async def stop(self) -> None:
        """Leave nothing behind."""
        for child in self.children:
            await child.stop()

    async def _check_now(self, one: Asked, digest: bytes) -> None:
        if notes := await self._notes_of(one, digest):
            self._tell(notes)
        self._passed[digest] = None
        if len(self._passed) > _MAX_REMEMBERED:
            self._passed.popitem(last=False)

    async def _notes_of(self, one: Asked, digest: bytes) -> str:
        if not self.children:
            try:
                return "\n".join(check_asks([one]))
            except InvalidAsk as error:
                raise ERRORS_BY_CODE.get(error.code, PrepareError)(error.message, error.param) from None
        self._refuse_fatal(digest)
        param = field_of(one)

        def failed(how: str) -> InvalidValue:
            error = InvalidValue(f"'{param}' is too complex: compiling it {how}. Make it simpler.", param)
            self._fatal[digest] = (time.monotonic() + _FATAL_S, error.message, param)
            return error

        async with self._turn:
            child = max(self._free, key=lambda one: one.is_warm)
            self._free.remove(child)
            try:
                return (await child.ask(frame(AsksToCheck(asks=[one])), _MAX_CHARS, failed)).text
            finally:
                self._free.append(child)

    def _refuse_fatal(self, digest: bytes) -> None:
        now, fatal = time.monotonic(), self._fatal
        while fatal and (next(iter(fatal.values()))[0] <= now or len(fatal) > _MAX_REMEMBERED):
            fatal.popitem(last=False)
        if digest in fatal:
            raise InvalidValue(*fatal[digest][1:])


def _digest(one: Asked) -> bytes:
    return hashlib.blake2b(one.value, digest_size=16, key=one.name.encode()).digest()
