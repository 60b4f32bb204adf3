"""A conversation as a model is to go on with it, whatever surface it came by. Pure.

Each surface makes one of its own body (`surfaces/`), and names its own fields where that is wrong. What the answer is
to be is beside it, as `ChatOptions`.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from nodes.gateway.errors import required, unsupported
from nodes.gateway.fields.openai_types import REFUSAL_PART, TEXT_PARTS, ContentPart
from nodes.gateway.fields.tool_fields import NO_TOOLS, ToolUse
from nodes.gateway.fields.tool_types import SaidCall, SaidFunction

_ENCODE: Final = msgspec.json.Encoder().encode

Content = str | list[ContentPart]


class Turn(Struct, kw_only=True, omit_defaults=True):
    """A message, as chat templates take it. Results of tools are turns of the role `tool`."""

    role: str
    tool_call_id: str | None = None
    name: str | None = None
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[SaidCall] | None = None


class Conversation(Struct, frozen=True, kw_only=True):
    """`turns` are raw where they came as chat templates take them, with whatever fields. `tools` are those that may be
    called, and how. `late_system_as_user`: as in `Prepare`.
    """

    turns: Sequence[Turn] | Raw
    tools: ToolUse = NO_TOOLS
    late_system_as_user: bool = False

    @property
    def chat(self) -> bytes:
        """`Prepare.chat`."""
        return _ENCODE(self.turns)


def call_of(call_id: str, name: str, arguments: str) -> SaidCall:
    """A call that was made; `arguments` as JSON."""
    return SaidCall(id=call_id, type="function", function=SaidFunction(name=name, arguments=arguments))


def check_parts(content: Content, where: str) -> None:
    """Raises BadRequest for a part, of those in `where`, that is none of the kinds that models here can be shown."""
    for number, part in enumerate(() if isinstance(content, str) else content):
        if part.type not in TEXT_PARTS and part.type != REFUSAL_PART:
            message = f"Content of type '{part.type[:64]}' is not supported by this model."
            raise unsupported(message, f"{where}.{number}.type")
        field = "refusal" if part.type == REFUSAL_PART else "text"
        required(getattr(part, field), f"{where}.{number}.{field}")
