"""From the JSON that a client sent to what chat templates expect. Pure; runs where templates run.

Follows transformers (None-valued keys are dropped, reasoning under its three names) and vLLM (parts of a content list
are joined with newlines, arguments of tool calls are parsed), since those are what templates are written against. What
OpenAI's API has and templates lack is translated into their terms (`TemplateDialect`).
"""

import re
from typing import Any, Final, NamedTuple, cast

import msgspec

from nodes.tokenizer.errors import PrepareError, TemplateError, UnsupportedContent

_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Part types that are text, and the key that holds the text."""
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_CONTENT_IS_NONE: Final = re.compile(r"""content(?:['"]\s*\])?\s+is\s+(?:not\s+)?none""")


class TemplateDialect(NamedTuple):
    """Which parts of a chat that not every template knows are known to this one."""

    has_developer: bool
    has_null_content: bool

    @classmethod
    def of(cls, source: str) -> "TemplateDialect":
        """The dialect of a template, from its text."""
        return cls("developer" in source, _CONTENT_IS_NONE.search(source) is not None)


def parse_messages(chat: bytes, dialect: TemplateDialect) -> list[dict[str, Any]]:
    """The messages of a chat. Raises TemplateError or UnsupportedContent, both naming `messages`."""
    messages = _decode(chat, "messages")
    if not isinstance(messages, list) or not messages:
        raise TemplateError("messages has to be a list of at least one message", "messages")
    return [_message(message, f"messages[{i}]", dialect) for i, message in enumerate(cast("list[Any]", messages))]


def parse_tools(tools: bytes | None) -> list[Any] | None:
    """The tools of a chat, None if there are none. Raises TemplateError (`tools`) if they are no list."""
    parsed = None if tools is None else _decode(tools, "tools")
    if parsed is not None and not isinstance(parsed, list):
        raise TemplateError("tools has to be a list of tools", "tools")
    return cast("list[Any] | None", parsed) or None


def parse_template_kwargs(kwargs: bytes | None) -> dict[str, Any]:
    """Further variables for the template. Raises TemplateError naming `chat_template_kwargs`."""
    parsed = None if kwargs is None else _decode(kwargs, "chat_template_kwargs")
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise TemplateError("chat_template_kwargs has to be an object", "chat_template_kwargs")
    variables = cast("dict[str, Any]", parsed)
    if taken := sorted(_RESERVED & variables.keys()):
        raise TemplateError(f"chat_template_kwargs cannot set {taken[0]!r}", "chat_template_kwargs")
    return variables


def _decode(document: bytes, param: str) -> Any:
    try:
        return msgspec.json.decode(document)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise TemplateError(f"{param} is not JSON: {error}", param) from error


def _message(value: Any, where: str, dialect: TemplateDialect) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TemplateError(f"{where} is not an object", "messages")
    given = cast("dict[str, Any]", value)
    message = {key: item for key, item in given.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise TemplateError(f"{where}.role has to be a string", "messages")
    if message["role"] == "developer" and not dialect.has_developer:
        # OpenAI's later name for the same thing.
        message["role"] = "system"
    if isinstance(message.get("function_call"), dict):
        # OpenAI's earlier form of a call, which no template knows.
        message.setdefault("tool_calls", [{"type": "function", "function": message.pop("function_call")}])
    if "content" in message:
        message["content"] = _content(message["content"], f"{where}.content")
    elif "refusal" in message:
        message["content"] = _content(message["refusal"], f"{where}.refusal")
    elif "tool_calls" in message:
        # A template that tests for none expects null; any other appends the content to a text, so it needs a string.
        message["content"] = None if dialect.has_null_content else ""
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError(f"{where} has to be a string or a list of parts", "messages")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(cast("list[Any]", content)))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _bad_part(where, "is neither a string nor an object")
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    if not isinstance(kind, str):
        raise _bad_part(where, "has no type")
    key = _TEXT_PARTS.get(kind)
    if key is None:
        raise UnsupportedContent(f"{where} is of type {kind[:50]!r}; this model takes text only", "messages")
    text = fields.get(key)
    if not isinstance(text, str):
        raise _bad_part(where, f"has no {key}")
    return text


def _bad_part(where: str, why: str) -> PrepareError:
    return TemplateError(f"{where} {why}", "messages")


def _tool_call(call: Any) -> Any:
    """OpenAI's clients send arguments as JSON in a string; templates print the object."""
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    if not isinstance(fields.get("function"), dict):
        return fields
    function: dict[str, Any] = fields["function"]
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, KeyError):
        return fields
    return {**fields, "function": {**function, "arguments": arguments}}
