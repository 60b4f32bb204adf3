"""Runs chat templates bounded in time, memory and output. Used by `nodes/tokenizer/actor.py`.

`ChildRenderer` has a child process that is killed when a rendering takes too long (`bounded_child.py`).
`InlineRenderer` is for the simulation, where there are no processes and templates are our own.
"""

import os
from typing import Protocol

from typing_extensions import override

from nodes.tokenizer.child.bounded_child import BoundedChild
from nodes.tokenizer.child.protocol import Setup, frame
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import TemplateError
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate


class Renderer(Protocol):
    """Renders chats of one model."""

    @property
    def shows_tools(self) -> bool:
        """Whether the template renders the tools that a request offers; known after `start`."""
        ...

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

    @property
    @override
    def shows_tools(self) -> bool:
        return self._template.dialect.shows_tools

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
        setup = Setup(
            template=template,
            special_tokens=special_tokens,
            max_chars=max_chars,
            memory_bytes=limits.memory_bytes,
            parent_pid=os.getpid(),
        )
        self._max_chars = max_chars
        self.child = BoundedChild(setup, limits, _failed, "renders chat templates")

    @property
    @override
    def shows_tools(self) -> bool:
        return self.child.dialect is not None and self.child.dialect.shows_tools

    @override
    async def start(self) -> str:
        """Warm the child. A template that cannot be used is reported here, and is an error of each `render`."""
        try:
            await self.child.warm()
        except TemplateError as error:
            return error.message
        return self.child.problem

    @override
    async def render(self, request: ChatRequest) -> str:
        """Raises Overloaded if too many wait or no process can be started."""
        return (await self.child.ask(frame(request), max(self._max_chars, request.max_chars))).text

    @override
    async def stop(self) -> None:
        await self.child.stop()


def _failed(how: str) -> TemplateError:
    return TemplateError(f"the chat template {how}", "messages")
