"""A conversation's items as the messages of a chat. Pure.

A model's turn is several items (reasoning, a message, calls) and one message; the system's word is what `instructions`
and the first messages say together, since many templates take one system message, at the beginning.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.openai_types import TEXT_PARTS
from nodes.gateway.surfaces.responses.body import ResponseItem, ResponsePart
from nodes.gateway.surfaces.responses.tools import CUSTOM_INPUT, flat_name

_SYSTEM_ROLES: Final = ("system", "developer")
_SEALED: Final = "kvmesh1."
"""Begins reasoning as agents carry it that send no other form of it back. It is encoded, not encrypted."""


def seal(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item."""
    return _SEALED + urlsafe_b64encode(reasoning.encode()).decode()


def _unsealed(sealed: str) -> str:
    """Empty for what another server has encrypted."""
    if not sealed.startswith(_SEALED):
        return ""
    try:
        return urlsafe_b64decode(sealed.removeprefix(_SEALED)).decode()
    except ValueError:
        return ""


class Conversation:
    """Gathers `messages`. `params` says where in the body the fields of messages come from."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.params: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None
        self._called: dict[str, str] = {}
        if instructions:
            self._message({"role": "system", "content": instructions}, "instructions")

    def add(self, items: Sequence[ResponseItem], where: str, *, is_stored: bool = False) -> None:
        """Items of the field `where`; those that are stored have no places in it. Raises `BadRequest`."""
        for index, item in enumerate(items):
            self._add(item, where if is_stored else f"{where}.{index}")

    def say(self, text: str, where: str) -> None:
        self._message({"role": "user", "content": text}, where)

    def _add(self, item: ResponseItem, where: str) -> None:
        match item.type:
            case "message":
                self._said(item, where)
            case "reasoning":
                self._thought(item, where)
            case "function_call":
                self._call(item, _required(item.arguments, f"{where}.arguments"), where)
            case "custom_tool_call":
                text = _required(item.input, f"{where}.input")
                self._call(item, msgspec.json.encode({CUSTOM_INPUT: text}).decode(), where)
            case "function_call_output" | "custom_tool_call_output":
                self._result(item, where)
            case "item_reference":
                message = (
                    f"'{where}' refers to an item by its id, and this server keeps none. Send the item itself (clients "
                    "do with `store: false`), or have the operator start it with `--responses-store BYTES`."
                )
                raise BadRequest(message, param=where, code="unsupported_parameter")
            case kind:
                message = f"Items of type '{kind[:64]}' are not supported by this server."
                raise BadRequest(message, param=f"{where}.type", code="unsupported_parameter")

    def _said(self, item: ResponseItem, where: str) -> None:
        role = _required(item.role, f"{where}.role")
        content = _content(_required(item.content, f"{where}.content"))
        if role == "assistant":
            self._turn_without("content", "tool_calls", where=where)["content"] = content
        elif role in _SYSTEM_ROLES and len(self.messages) == 1 and self.messages[0]["role"] in _SYSTEM_ROLES:
            self.messages[0]["content"] = _joined(self.messages[0]["content"], content)
        else:
            self._message({"role": role, "content": content}, where)

    def _thought(self, item: ResponseItem, where: str) -> None:
        if isinstance(item.content, str):
            text = item.content
        else:
            field, parts = ("content", item.content) if item.content else ("summary", item.summary or [])
            text = "".join(_required(part.text, f"{where}.{field}.{at}.text") for at, part in enumerate(parts))
        text = text or _unsealed(item.encrypted_content or "")
        if text:
            self._turn_without("reasoning_content", "content", "tool_calls", where=where)["reasoning_content"] = text

    def _call(self, item: ResponseItem, arguments: str, where: str) -> None:
        call_id = _required(item.call_id, f"{where}.call_id")
        name = flat_name(_required(item.name, f"{where}.name"), item.namespace)
        self._called[call_id] = name
        calls: list[Any] = self._turn_without(where=where).setdefault("tool_calls", [])
        here = f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"
        self.params |= {here: where, f"{here}.id": f"{where}.call_id", f"{here}.function": where}
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _result(self, item: ResponseItem, where: str) -> None:
        call_id = _required(item.call_id, f"{where}.call_id")
        name = self._called.get(call_id)
        if name is None:
            message = (
                f"'{where}' is the output of the call '{call_id[:64]}', which is not in the conversation before it."
            )
            raise BadRequest(message, param=f"{where}.call_id", code="invalid_value")
        content = _content(_required(item.output, f"{where}.output"))
        self._message({"role": "tool", "tool_call_id": call_id, "name": name, "content": content}, where)
        self.params[f"messages.{len(self.messages) - 1}.content"] = f"{where}.output"

    def _turn_without(self, *fields: str, where: str) -> dict[str, Any]:
        """The message of the model's turn; another one if this has any of these fields, which come before others."""
        if self._turn is None or any(field in self._turn for field in fields):
            # No content is an empty one, as templates have it that join content to reasoning or calls.
            self._message({"role": "assistant"}, where)
            self._turn = self.messages[-1]
        return self._turn

    def _message(self, message: dict[str, Any], where: str) -> None:
        self._turn = None
        self.params[f"messages.{len(self.messages)}"] = where
        self.messages.append(message)

    def finish(self) -> list[dict[str, Any]]:
        """The messages; a turn of reasoning alone gets the content that it has not come to."""
        for message in self.messages:
            if "content" not in message and "tool_calls" not in message:
                message["content"] = ""
        if not self.messages:
            # Clients ask with an empty input whether this route is there.
            self._message({"role": "user", "content": ""}, "input")
        return self.messages


def _required(value: Any, where: str) -> Any:
    if value is None:
        message = f"Missing required parameter: '{where}'."
        raise BadRequest(message, param=where, code="missing_required_parameter")
    return value


def _content(content: str | list[ResponsePart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0].type in TEXT_PARTS and content[0].text is not None:
        # What most agents send for a string; some templates take nothing else.
        return content[0].text
    fields = ("type", "text", "refusal")
    return [{key: value for key in fields if (value := getattr(part, key)) is not None} for part in content]


def _joined(first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_as_parts(first), *_as_parts(second)]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
