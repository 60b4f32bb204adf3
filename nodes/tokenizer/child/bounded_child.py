"""One warm child process (`render_child.py`) for work that a client's or a model's data may never let end.

It is killed when an answer takes too long, and the next question starts another. Used by `rendering.py` and
`ask_checks.py`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from nodes.tokenizer.child.protocol import (
    CHILD_DIRECTORY,
    HEAD_BYTES,
    Rendered,
    Setup,
    child_command,
    child_environment,
    frame,
)
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import ERRORS_BY_CODE, Overloaded, PrepareError

if TYPE_CHECKING:
    from nodes.tokenizer.templates.dialect import TemplateDialect

_BYTES_PER_CHAR: Final = 4
"""UTF-8 takes at most four."""
_REPLY_MARGIN_BYTES: Final = 1 << 16
"""For what surrounds the text, and error messages; with less, a reply at the limit would kill its child."""


class BoundedChild:
    """One child process, one question at a time, others wait in line.

    Args:
        setup: what it is for. limits: of one question.
        failed: the error of whoever asked when the child ran out of time or memory, from words that say so.
        work: what it does, in words.
    """

    def __init__(self, setup: Setup, limits: RenderingLimits, failed: Callable[[str], PrepareError], work: str) -> None:
        self._setup = setup
        self._limits = limits
        self._failed = failed
        self._work = work
        self._process: asyncio.subprocess.Process | None = None
        # One child, whose answers come in order: held for one question, which ends or is killed within `deadline_s`.
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self.problem = ""
        self.dialect: TemplateDialect | None = None
        self.num_killed = 0

    @property
    def pid(self) -> int | None:
        """Of the process that runs, or ran last; None before any."""
        return None if self._process is None else self._process.pid

    @property
    def is_warm(self) -> bool:
        """Whether its process runs, so that a question needs no other."""
        return self._process is not None and self._process.returncode is None

    async def warm(self) -> None:
        """Have a child that has answered its `Setup`, if it renders with its template's `dialect`; what it said is
        wrong is in `problem`. Raises PrepareError.
        """
        async with self._turn:
            await self._ensure()

    async def ask(
        self, request: bytes, max_chars: int, failed: Callable[[str], PrepareError] | None = None
    ) -> Rendered:
        """The answer to one frame; `failed` in place of the one for all.

        Raises PrepareError: Overloaded if too many wait or no process can be started, and what the child answers.
        """
        # Refused at once: with one child, each that waits adds up to `deadline_s` for those behind it.
        if self._num_waiting >= self._limits.max_waiting:
            raise Overloaded(f"{self._num_waiting} others wait for the process that {self._work}; try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                await self._ensure()
                rendered = await self._exchange(request, self._limits.deadline_s, max_chars, failed or self._failed)
        finally:
            self._num_waiting -= 1
        if rendered.code:
            raise ERRORS_BY_CODE.get(rendered.code, PrepareError)(rendered.message, rendered.param)
        return rendered

    async def stop(self) -> None:
        """Leave nothing behind."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ensure(self) -> None:
        # Started when it is needed, not when the last one died: a template that always kills it then costs one start
        # per request.
        if self.is_warm:
            return
        try:
            self._process = await asyncio.create_subprocess_exec(
                *child_command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(),
                cwd=CHILD_DIRECTORY,
            )
        except OSError as error:
            raise Overloaded(f"cannot start the process that {self._work}: {error}") from error
        answer = await self._exchange(frame(self._setup), self._limits.start_timeout_s, 0, self._failed)
        self.problem, self.dialect = answer.message, answer.dialect

    async def _exchange(
        self, request: bytes, timeout_s: float, max_chars: int, failed: Callable[[str], PrepareError]
    ) -> Rendered:
        """One request, one answer; the child does not outlive a failure, so answers cannot get out of step."""
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                rendered = await self._send_and_receive(request, _BYTES_PER_CHAR * max_chars + _REPLY_MARGIN_BYTES)
            answered = True
        except TimeoutError:
            raise failed(f"took longer than {timeout_s:g} s") from None
        except (OSError, EOFError, msgspec.MsgspecError):
            raise failed("ran out of memory or crashed its process") from None
        finally:
            # Also if the caller was cancelled: the child's answer would be taken for that of the next request.
            if not answered:
                self.num_killed += 1
                await self.stop()
        return rendered

    async def _send_and_receive(self, request: bytes, max_bytes: int) -> Rendered:
        process = self._process
        assert process is not None, "the child has not been started"
        assert process.stdin is not None, "the child has no pipe for input"
        assert process.stdout is not None, "the child has no pipe for output"
        process.stdin.write(request)
        await process.stdin.drain()
        num_bytes = int.from_bytes(await process.stdout.readexactly(HEAD_BYTES), "little")
        if num_bytes > max_bytes:
            raise EOFError("the reply is longer than any answer can be")
        return msgspec.msgpack.decode(await process.stdout.readexactly(num_bytes), type=Rendered)
