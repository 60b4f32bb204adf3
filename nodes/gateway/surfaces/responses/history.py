"""A conversation's items as its turns. Pure.

A model's turn is several items (reasoning, a message, calls); the system's word is what `instructions`
and the first messages say together, since many templates take one system message, at the beginning.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from nodes.gateway.errors import invalid, required, unsupported
from nodes.gateway.fields.conversation import Content, Turn, call_of, check_parts
from nodes.gateway.fields.openai_types import ContentPart
from nodes.gateway.surfaces.responses.body import ResponseItem
from nodes.gateway.surfaces.responses.tools import CUSTOM_INPUT, flat_name

_SYSTEM_ROLES: Final = ("system", "developer")
_RESULTS: Final = {"tool": "tool_call_id", "function": "name"}
"""By role, what messages of it would need, and items do not have: results are items of another type."""
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


class Turns:
    """Gathers the turns of items."""

    def __init__(self, instructions: str | None) -> None:
        self._turns: list[Turn] = []
        self._open: Turn | None = None
        self._called: dict[str, str] = {}
        if instructions:
            self.say("system", instructions)

    def add(self, items: Sequence[ResponseItem], where: str, *, is_stored: bool = False) -> None:
        """Items of the field `where`; those that are stored have no places in it. Raises `BadRequest`."""
        for index, item in enumerate(items):
            self._add(item, where if is_stored else f"{where}.{index}")

    def say(self, role: str, content: Content) -> None:
        self._append(Turn(role=role, content=content))

    def _add(self, item: ResponseItem, where: str) -> None:
        match item.type:
            case "message":
                self._said(item, where)
            case "reasoning":
                self._thought(item, where)
            case "function_call":
                self._call(item, required(item.arguments, f"{where}.arguments"), where)
            case "custom_tool_call":
                text = required(item.input, f"{where}.input")
                self._call(item, msgspec.json.encode({CUSTOM_INPUT: text}).decode(), where)
            case "function_call_output" | "custom_tool_call_output":
                self._result(item, where)
            case "item_reference":
                message = (
                    f"'{where}' refers to an item by its id, and this server keeps none. Send the item itself (clients "
                    "do with `store: false`), or have the operator start it with `--responses-store BYTES`."
                )
                raise unsupported(message, where)
            case kind:
                raise unsupported(f"Items of type '{kind[:64]}' are not supported by this server.", f"{where}.type")

    def _said(self, item: ResponseItem, where: str) -> None:
        role = required(item.role, f"{where}.role")
        if role in _RESULTS:
            required(None, f"{where}.{_RESULTS[role]}")
        content = _content(item.content, f"{where}.content")
        first = self._turns[0] if len(self._turns) == 1 else None
        if role == "assistant":
            self._turn(is_taken=lambda turn: turn.content is not None or bool(turn.tool_calls)).content = content
        elif role in _SYSTEM_ROLES and first is not None and first.role in _SYSTEM_ROLES:
            first.content = _joined(first.content or "", content)
        else:
            self.say(role, content)

    def _thought(self, item: ResponseItem, where: str) -> None:
        if isinstance(item.content, str):
            text = item.content
        else:
            field, parts = ("content", item.content) if item.content else ("summary", item.summary or [])
            text = "".join(required(part.text, f"{where}.{field}.{at}.text") for at, part in enumerate(parts))
        text = text or _unsealed(item.encrypted_content or "")
        if text:
            self._turn(is_taken=lambda turn: turn != Turn(role="assistant")).reasoning_content = text

    def _call(self, item: ResponseItem, arguments: str, where: str) -> None:
        call_id = required(item.call_id, f"{where}.call_id")
        name = flat_name(required(item.name, f"{where}.name"), item.namespace)
        self._called[call_id] = name
        turn = self._turn()
        turn.tool_calls = [*(turn.tool_calls or ()), call_of(call_id, name, arguments)]

    def _result(self, item: ResponseItem, where: str) -> None:
        call_id = required(item.call_id, f"{where}.call_id")
        name = self._called.get(call_id)
        if name is None:
            problem = (
                f"'{where}' is the output of the call '{call_id[:64]}', which is not in the conversation before it."
            )
            raise invalid(problem, f"{where}.call_id")
        content = _content(item.output, f"{where}.output")
        self._append(Turn(role="tool", tool_call_id=call_id, name=name, content=content))

    def _turn(self, is_taken: Callable[[Turn], bool] = lambda _: False) -> Turn:
        """The model's turn; another one if what is to be said comes before something that this one has."""
        if self._open is None or is_taken(self._open):
            # No content is an empty one, as templates have it that join content to reasoning or calls.
            self._append(turn := Turn(role="assistant"))
            self._open = turn
        return self._open

    def _append(self, turn: Turn) -> None:
        self._open = None
        self._turns.append(turn)

    def finish(self) -> list[Turn]:
        """All turns; one of reasoning alone gets the content that it has not come to."""
        for turn in self._turns:
            if turn.content is None and not turn.tool_calls:
                turn.content = ""
        # Clients ask with an empty input whether this route is there.
        return self._turns or [Turn(role="user", content="")]


def _content(content: Content | None, where: str) -> Content:
    given = required(content, where)
    check_parts(given, where)
    if len(given) == 1 and not isinstance(given, str) and given[0].text is not None:
        # What most agents send for a string; some templates take nothing else.
        return given[0].text
    return given


def _joined(first: Content, second: Content) -> Content:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_as_parts(first), *_as_parts(second)]


def _as_parts(content: Content) -> list[ContentPart]:
    return [ContentPart(type="text", text=content)] if isinstance(content, str) else content
