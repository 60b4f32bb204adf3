"""Tools and calls in bodies of chats, as types; what they cannot say is checked by `tool_fields.py`."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

MAX_TOOLS: Final = 128
"""OpenAI's limit."""
MAX_NAME_CHARS: Final = 128
"""Twice OpenAI's: names of servers and tools that are joined by agents are longer than 64."""

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]+\Z", max_length=MAX_NAME_CHARS)]
"""Letters, digits, and what joins names: what every template and every form of calls can show."""


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    """A function that the model may call. With `strict` its arguments are kept within `parameters`, a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct, frozen=True, kw_only=True):
    """The name of an offered function."""

    name: str


class NamedTool(Struct, frozen=True, kw_only=True):
    """One of the offered tools."""

    type: Literal["function"]
    function: NamedFunction


class CallThis(Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The model calls this function, once."""

    function: NamedFunction


class AllowedTools(Struct, frozen=True, kw_only=True):
    """Some of the offered tools, and whether the model may or must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class CallOneOf(Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The model calls none but these."""

    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
Functions = Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | CallThis | CallOneOf
FunctionChoice = Literal["none", "auto"] | NamedFunction
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SaidFunction(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model called; `arguments` are a JSON object as text, or as it is."""

    name: str
    arguments: str | dict[str, Any] | None = None


class SaidCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call in a message of an assistant."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: SaidFunction
