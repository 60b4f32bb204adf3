"""From the JSON that a client sent to what chat templates expect. Pure; runs where templates run.

Follows transformers (None-valued keys are dropped, reasoning under its three names) and vLLM (parts of a content list
are joined with newlines for a template that takes strings only, arguments of tool calls are parsed), since those are
what templates are written against. What OpenAI's API has and templates lack is translated into their terms
(`TemplateDialect`).
"""

import hashlib
import json
import re
from itertools import groupby
from typing import Any, Final, cast

import msgspec

from nodes.tokenizer.errors import PrepareError, TemplateError, UnsupportedContent
from nodes.tokenizer.templates.dialect import Content, TemplateDialect, as_content, text_of, with_mark

_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Part types that are text, and the key that holds the text."""
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_LEGACY_ID: Final = "function0"
"""Of a call that has none: the answer to a function names the function alone."""
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


def parse_messages(chat: bytes, dialect: TemplateDialect) -> list[dict[str, Any]]:
    """Raises TemplateError or UnsupportedContent, both naming `messages`."""
    messages = _decode(chat, "messages")
    if not isinstance(messages, list) or not messages:
        raise TemplateError("messages has to be a list of at least one message", "messages")
    read = [_message(message, f"messages[{i}]", dialect) for i, message in enumerate(cast("list[Any]", messages))]
    _name_calls(read, dialect)
    return _in_order_of_calls(read)


def late_system_as_user(messages: list[dict[str, Any]], dialect: TemplateDialect) -> list[dict[str, Any]]:
    """System messages after the first turn as part of the turn before, or as a turn of the user, between marks that
    Claude Code's prompts explain. Roles still alternate where they did.
    """
    folded: list[dict[str, Any]] = []
    is_late = joins_next = False
    for message in messages:
        is_system = message["role"] in ("system", "developer")
        is_late = is_late or not is_system
        last = folded[-1] if folded else message
        if is_system and is_late:
            reminder = f"<system-reminder>\n{text_of(message.get('content'))}\n</system-reminder>"
            if last["role"] in ("user", "tool") and last.get("content"):
                folded[-1] = {**last, "content": with_mark(last["content"], f"\n\n{reminder}")}
                continue
            message = {"role": "user", "content": as_content(reminder, dialect.form("user"))}
            joins_next = True
        elif joins_next and message["role"] == "user":
            text = f"{text_of(last['content'])}\n\n{text_of(message.get('content'))}"
            folded[-1] = {**message, "content": as_content(text, dialect.form("user"))}
            joins_next = False
            continue
        else:
            joins_next = False
        folded.append(message)
    return folded


def with_users_joined(messages: list[dict[str, Any]], dialect: TemplateDialect) -> list[dict[str, Any]]:
    """What the user says in several messages in a row as one: agents say where they are before the question."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] == last.get("role") == "user":
            text = f"{text_of(last.get('content'))}\n\n{text_of(message.get('content'))}"
            joined[-1] = {**last, **message, "content": as_content(text, dialect.form("user"))}
        else:
            joined.append(message)
    return joined


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
    if message["role"] == "developer" and "developer" not in dialect.forms:
        # OpenAI's later name for the same thing.
        message["role"] = "system"
    if isinstance(message.get("function_call"), dict):
        # OpenAI's earlier form of a call, which no template knows.
        call = {"id": _LEGACY_ID, "type": "function", "function": message.pop("function_call")}
        message.setdefault("tool_calls", [call])
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if (said := next((key for key in ("content", "refusal") if key in message), None)) is not None:
        message["content"] = _content(message[said], f"{where}.{said}", message["role"], dialect)
    elif "tool_calls" in message:
        message["content"] = None if dialect.has_null_content else ""
    elif reasoning is not None:
        message["content"] = as_content("", dialect.form(message["role"]))
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call, dialect) for call in message["tool_calls"]]
    if reasoning is not None:
        content = message.get("content")
        if dialect.joins_reasoning and "tool_calls" in message and content:
            reasoning, message["content"] = f"{reasoning}\n\n{text_of(content)}", ""
        message = {**message, "thinking": reasoning, "reasoning_content": reasoning}
    return message


def _name_calls(messages: list[dict[str, Any]], dialect: TemplateDialect) -> None:
    """Give ids that the template takes, and to answers to functions, OpenAI's earlier form, the role of today."""
    ids: dict[str, str] = {}
    for i, message in enumerate(messages):
        calls: Any = message.get("tool_calls")
        for j, call in enumerate(calls if isinstance(calls, list) else ()):  # pyright: ignore[reportUnknownArgumentType]
            _name_call(call, f"c{i:04d}{j:04d}", ids, dialect)
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": ids.get(str(message.get("name")), "")}
        elif "tool_call_id" in message:
            message["tool_call_id"] = _call_id(str(message["tool_call_id"]), dialect)


def _name_call(call: Any, new_id: str, ids: dict[str, str], dialect: TemplateDialect) -> None:
    if not isinstance(call, dict):
        return
    fields = cast("dict[str, Any]", call)
    if "id" in fields or dialect.has_short_ids:
        fields["id"] = _call_id(str(fields.get("id") or new_id), dialect)
    function: Any = fields.get("function")
    if isinstance(function, dict) and "id" in fields:
        ids[str(cast("dict[str, Any]", function).get("name"))] = fields["id"]


def _in_order_of_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that follow a message with calls, in the order of its calls: clients say by ids which is whose, and
    send them as their tools ended, but most templates show no ids, so that a model takes the first for the first's.
    """
    ordered: list[dict[str, Any]] = []
    places: dict[Any, int] = {}
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        said = [*run]
        if is_result:
            # Stable: results of one id, as some servers give all calls, stay as they came.
            said.sort(key=lambda result: places.get(result.get("tool_call_id"), 0))
        calls: Any = said[-1].get("tool_calls")
        places = {}
        for at, call in enumerate(cast("list[Any]", calls) if isinstance(calls, list) else []):
            if isinstance(call, dict):
                places.setdefault(cast("dict[str, Any]", call).get("id"), at)
        ordered += said
    return ordered


def _call_id(given: str, dialect: TemplateDialect) -> str:
    """An id that the template takes, the same for the same id: a call and its answer keep the same."""
    if not dialect.has_short_ids or _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _content(content: Any, where: str, role: str, dialect: TemplateDialect) -> Content:
    if isinstance(content, list):
        content = [_part(part, f"{where}[{i}]") for i, part in enumerate(cast("list[Any]", content))]
    elif not isinstance(content, str):
        raise TemplateError(f"{where} has to be a string or a list of parts", "messages")
    return as_content(content, dialect.form(role))


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


def _tool_call(call: Any, dialect: TemplateDialect) -> Any:
    """OpenAI's clients send arguments as JSON in a string; templates print the object, most of them."""
    if not isinstance(call, dict):
        return call
    fields = dict(cast("dict[str, Any]", call))
    if not isinstance(fields.get("function"), dict):
        return fields
    function: dict[str, Any] = fields["function"]
    # Models write nothing at all for a function without parameters.
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _arguments(arguments, dialect)
    elif dialect.has_text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**fields, "function": {**function, "arguments": arguments}}


def _arguments(text: str, dialect: TemplateDialect) -> Any:
    """Those of a call that went wrong as part of an object: agents send them back with what their tool said of them."""
    try:
        read = _OBJECT.decode(text) if text.strip() else {}
    except (msgspec.MsgspecError, RecursionError, ValueError):
        read = {"arguments": text}
        text = json.dumps(read, ensure_ascii=False)
    return text if dialect.has_text_arguments else read
