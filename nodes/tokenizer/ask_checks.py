"""Checks what requests ask of their draws before it is served: a schema, an expression, a grammar.

Compiling one may take all time or memory, and crash; a child process does it, which is not the one that renders chats.
What has passed is remembered, since agents send the same few again and again.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from nodes.asks import InvalidAsk, check_asks, field_of
from nodes.request import Asked
from nodes.tokenizer.bounded_child import BoundedChild
from nodes.tokenizer.child_protocol import AsksToCheck, Setup, frame
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import ERRORS_BY_CODE, InvalidValue, PrepareError

_MAX_REMEMBERED: Final = 4096
"""Digests of 16 bytes."""
_MAX_CHARS: Final = 16_384
"""Of notes: a line for each kind of keyword that is ignored."""


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
        self.child = BoundedChild(setup, limits, InvalidValue, "checks schemas") if use_process else None
        self._tell = tell
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_killed(self) -> int:
        """Children that were killed, or died, in the middle of a check."""
        return self.child.num_killed if self.child is not None else 0

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
            if notes := await self._notes_of(one):
                self._tell(notes)
            self._passed[digest] = None
            if len(self._passed) > _MAX_REMEMBERED:
                self._passed.popitem(last=False)

    async def stop(self) -> None:
        """Leave nothing behind."""
        if self.child is not None:
            await self.child.stop()

    async def _notes_of(self, one: Asked) -> str:
        if self.child is None:
            try:
                return "\n".join(check_asks([one]))
            except InvalidAsk as error:
                raise ERRORS_BY_CODE.get(error.code, PrepareError)(error.message, error.param) from None
        param = field_of(one)

        def failed(how: str) -> InvalidValue:
            return InvalidValue(f"'{param}' is too complex: compiling it {how}. Make it simpler.", param)

        return (await self.child.ask(frame(AsksToCheck(asks=[one])), _MAX_CHARS, failed)).text


def _digest(one: Asked) -> bytes:
    return hashlib.blake2b(one.value, digest_size=16, key=one.name.encode()).digest()
