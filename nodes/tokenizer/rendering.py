"""Runs chat templates bounded in time, memory and output. Used by `nodes/tokenizer/actor.py`.

`ChildRenderer` keeps one warm child process (`render_child.py`) and kills it when a rendering takes too long; the next
request starts another. `InlineRenderer` is for the simulation, where there are no processes and templates are our own.
"""

import asyncio
import contextlib
import os
from typing import Final, Protocol

import msgspec
from typing_extensions import override

from nodes.tokenizer.chat_template import ChatRequest, ChatTemplate
from nodes.tokenizer.child_protocol import (
    CHILD_DIRECTORY,
    HEAD_BYTES,
    Rendered,
    Setup,
    child_command,
    child_environment,
    frame,
)
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import ERRORS_BY_CODE, Overloaded, PrepareError, TemplateError

_BYTES_PER_CHAR: Final = 4
"""UTF-8 takes at most four."""
_REPLY_MARGIN_BYTES: Final = 1 << 16
"""For what surrounds the text, and error messages; with less, a reply at the limit would kill its child."""


class Renderer(Protocol):
    """Renders chats of one model."""

    async def start(self) -> str:
        """Be ready for requests. Returns what is wrong with the template if it can serve none, else an empty string."""
        ...

    async def render(self, request: ChatRequest) -> str:
        """The prompt's text. Raises PrepareError."""
        ...

    async def stop(self) -> None:
        """Leave nothing behind."""
        ...


class InlineRenderer(Renderer):
    """Renders where it is called; nothing bounds its time."""

    def __init__(self, template: str, special_tokens: dict[str, str], max_chars: int) -> None:
        self._template = ChatTemplate(template, special_tokens, max_chars)

    @override
    async def start(self) -> str:
        """Nothing to do: the template was compiled and probed when this was made."""
        return ""

    @override
    async def render(self, request: ChatRequest) -> str:
        return self._template.render(request)

    @override
    async def stop(self) -> None:
        """Nothing to do."""


class ChildRenderer(Renderer):
    """One child process, one rendering at a time, others wait in line."""

    def __init__(self, template: str, special_tokens: dict[str, str], max_chars: int, limits: RenderingLimits) -> None:
        self._limits = limits
        self._setup = Setup(
            template=template,
            special_tokens=special_tokens,
            max_chars=max_chars,
            memory_bytes=limits.memory_bytes,
            parent_pid=os.getpid(),
        )
        self._max_chars = max_chars
        self.child: asyncio.subprocess.Process | None = None
        # One child, whose answers come in order: held for one rendering, which ends or is killed within `deadline_s`.
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._problem = ""
        self.num_killed = 0

    @override
    async def start(self) -> str:
        """Warm the child. A template that cannot be used is reported here, and is an error of each `render`."""
        async with self._turn:
            try:
                await self._ensure_child()
            except TemplateError as error:
                return error.message
        return self._problem

    @override
    async def render(self, request: ChatRequest) -> str:
        """Raises Overloaded if too many wait or no process can be started."""
        # Refused at once: with one child, each that waits adds up to `deadline_s` for those behind it.
        if self._num_waiting >= self._limits.max_waiting:
            raise Overloaded(f"{self._num_waiting} chats are waiting to be rendered; try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                await self._ensure_child()
                max_chars = max(self._max_chars, request.max_chars)
                rendered = await self._exchange(frame(request), self._limits.deadline_s, max_chars)
        finally:
            self._num_waiting -= 1
        if rendered.code:
            error = ERRORS_BY_CODE.get(rendered.code, PrepareError)
            raise error(rendered.message, rendered.param)
        return rendered.text

    @override
    async def stop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _ensure_child(self) -> None:
        # Started when it is needed, not when the last one died: a template that always kills it then costs one start
        # per request.
        if self.child is not None and self.child.returncode is None:
            return
        try:
            self.child = await asyncio.create_subprocess_exec(
                *child_command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(),
                cwd=CHILD_DIRECTORY,
            )
        except OSError as error:
            raise Overloaded(f"cannot start a process to render chat templates: {error}") from error
        self._problem = (await self._exchange(frame(self._setup), self._limits.start_timeout_s, 0)).message

    async def _exchange(self, request: bytes, timeout_s: float, max_chars: int) -> Rendered:
        """One request, one answer; the child does not outlive a failure, so answers cannot get out of step."""
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                rendered = await self._send_and_receive(request, _BYTES_PER_CHAR * max_chars + _REPLY_MARGIN_BYTES)
            answered = True
        except TimeoutError:
            raise TemplateError(f"the chat template took longer than {timeout_s:g} s", "messages") from None
        except (OSError, EOFError, msgspec.MsgspecError):
            raise TemplateError("the chat template ran out of memory or crashed its process", "messages") from None
        finally:
            # Also if the caller was cancelled: the child's answer would be taken for that of the next request.
            if not answered:
                self.num_killed += 1
                await self.stop()
        return rendered

    async def _send_and_receive(self, request: bytes, max_bytes: int) -> Rendered:
        child = self.child
        assert child is not None, "the child has not been started"
        assert child.stdin is not None, "the child has no pipe for input"
        assert child.stdout is not None, "the child has no pipe for output"
        child.stdin.write(request)
        await child.stdin.drain()
        num_bytes = int.from_bytes(await child.stdout.readexactly(HEAD_BYTES), "little")
        if num_bytes > max_bytes:
            raise EOFError("the reply is longer than any rendering can be")
        return msgspec.msgpack.decode(await child.stdout.readexactly(num_bytes), type=Rendered)
