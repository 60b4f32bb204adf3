"""Finds out what a chat template takes, by rendering short chats with marks and looking for the marks.

How a template reads contents cannot be told from its text: a macro hides the loop over the parts, and templates differ
by role (Gemma 3's shows the first part of a system message only). So each role is tried with a string, with two parts
and with one, in chats that fit: some templates demand that user and assistant alternate, or know no system message.
Pure; at most `MAX_RENDERINGS`, which `chat_template.py` does and `render_child.py` bounds in time and memory.
"""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from nodes.tokenizer.errors import ContextLengthExceeded, PrepareError, TemplateError
from nodes.tokenizer.templates.dialect import Content, ContentForm, TemplateDialect, as_content, text_part

MAX_RENDERINGS: Final = 73
"""The most that any template can cause (tests try random answers); each takes a millisecond of a start."""

Render: TypeAlias = Callable[[list[dict[str, Any]], list[Any] | None], str]
"""Renders messages and tools. Raises PrepareError."""

# Of digits, which no filter for upper or lower case changes, and without spaces, which others trim.
_FIRST: Final = "7301946528"
_SECOND: Final = "8462019375"
_ARGUMENT: Final = "6084725139"
_RAW: Final = "5528190467"
"""Shows if a list is printed, by Python or as JSON: under a key that no template asks for."""

_STRING: Final = _FIRST
_PART: Final[Content] = [{**text_part(_FIRST), "mark": _RAW}]
_PARTS: Final[Content] = [*_PART, {**text_part(_SECOND), "mark": _RAW}]

_FITTING: Final = {
    "user": ("X", "system X", "user assistant X"),
    "assistant": ("user X user", "user X"),
    "system": ("X user", "X user assistant user"),
    "tool": ("tools user call X", "user call X"),
}
"""Chats to try a role in, the next if it does not show in the one before. X: the message that is tried."""
_CALLING: Final = ("user call", "user call tool", "user call tool assistant user")

_OFFERING: Final = ("tools user", "tools system user")

# After the one of them, a template that counts turns would take the rest for another role's.
_LATE: Final = ("user X assistant user", "user assistant user X")

_MADE_UP_ROLE: Final = "madeuprole"
_FILLER: Final = "Hello."
_FUNCTION: Final = "count"
_CALL_ID: Final = "probe0001"
"""Mistral's templates want nine letters or digits."""
_LONG_ID: Final = "call_0123456789abcdef01234567"
_DESCRIPTION: Final = "3917460258"
_PARAMETER: Final = "to_2750483916"
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": f"Counts {_DESCRIPTION}.",
        "parameters": {"type": "object", "properties": {_PARAMETER: {"type": "string", "description": "The end."}}},
    },
}
_ARGUMENTS: Final = {_PARAMETER: _ARGUMENT}
_SAID_CHARS: Final = 200
"""One line in the note to whoever starts the mesh."""


def probe_template(render: Render) -> TemplateDialect:
    """Raises TemplateError if the template shows a user's text in no form, or takes all memory."""
    probe = _Probe(render)
    # Each in chats of those before it, written as has been found to be right for them.
    probe.learn("user")
    probe.learn("assistant")
    probe.learn_calls()
    probe.learn("system")
    probe.learn("tool")
    probe.learn_developer()
    function = probe.call["tool_calls"][0]["function"]
    return TemplateDialect(
        forms=probe.forms,
        left_out=tuple(probe.left_out),
        refused=probe.refused,
        has_null_content=probe.call["content"] is None,
        has_text_arguments=isinstance(function["arguments"], str),
        shows_tools=probe.shows_tools(),
        shows_late_system=probe.shows_late_system(),
        joins_users=probe.refuses_users_in_a_row(),
        has_short_ids=probe.refuses_call({"tool_calls": [_with_id(probe.call["tool_calls"][0], _LONG_ID)]}),
        joins_reasoning=probe.refuses_call({"content": _FILLER, "thinking": _FILLER, "reasoning_content": _FILLER}),
    )


class _Found(NamedTuple):
    """The form in which a role shows, and the chat where it does; or those that were rendered without its text."""

    form: ContentForm | None
    chat: str
    silent: list[str]
    failure: str


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._failure = ""
        self.forms: dict[str, ContentForm] = {}
        self.left_out: list[str] = []
        self.refused: dict[str, str] = {}
        self.call = _calling("", _ARGUMENTS)
        self._calling = ""

    def learn(self, role: str) -> None:
        found = self._find(role, _FITTING[role])
        if found.form is not None:
            self.forms[role] = found.form
        elif not found.silent:
            self.refused[role] = found.failure
        elif role == "user":
            raise TemplateError(
                "the chat template leaves out what users say, whether it is sent as a string or as a list of parts",
                "messages",
            )
        elif any(self._shows_as_user(chat) for chat in found.silent):
            self.left_out.append(role)

    def learn_developer(self) -> None:
        """It is known if its text shows, and not just as that of any role would."""
        found = self._find("developer", _FITTING["system"])
        if found.form is None:
            return
        content = as_content(_STRING, found.form)
        known, made_up = (self._try(found.chat, role, content) or "" for role in ("developer", _MADE_UP_ROLE))
        if made_up.lower().replace(_MADE_UP_ROLE, "developer") != known.lower():
            self.forms["developer"] = found.form

    def refuses_call(self, changed: dict[str, Any]) -> bool:
        """Whether it fails for a message with a call that is changed like this; False if it shows none anyway."""
        chat = f"{self._calling}{_CALLING[-1]}"
        if self._try(chat) is None:
            return False
        return self._try(chat, call={**self.call, **changed}) is None

    def refuses_users_in_a_row(self) -> bool:
        """As templates do that have user and assistant alternate."""
        return self._try("user user") is None and self._try("user assistant user") is not None

    def shows_tools(self) -> bool:
        """Some show them beside a system message only, some without their descriptions."""
        texts = (self._try(chat) or "" for chat in _OFFERING)
        return any(_DESCRIPTION in text or _PARAMETER in text for text in texts)

    def shows_late_system(self) -> bool:
        """Some gather all of them at the beginning, many leave later ones out or refuse them."""
        form = self.forms.get("system")
        return form is not None and all(self._is_in_place(chat, as_content(_STRING, form)) for chat in _LATE)

    def _is_in_place(self, chat: str, content: Content) -> bool:
        before, mark, _ = (self._try(chat, "system", content) or "").partition(_FIRST)
        return bool(mark) and before.count(_FILLER) == len(chat.partition("X")[0].split())

    def learn_calls(self) -> None:
        """Find how a call of a tool shows in most chats: better null content than empty, better an object than JSON.

        A template that tests for null may leave out the call if there is an empty string instead. Another one fails at
        null, or prints `None`; some only once the call has been answered (QwQ's). Some fail without tools, some with.
        """
        most = (0, 0)
        for tools in ("", "tools "):
            for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
                calls = [_calling(content, arguments) for content in (None, "")]
                texts = [[self._try(tools + chat, call=call) for call in calls] for chat in _CALLING]
                nulls = [None if _prints_none(null, empty) else null for null, empty in texts]
                for call, rendered in zip(calls, (nulls, [empty for _, empty in texts]), strict=True):
                    shown = sum(text is not None and _ARGUMENT in text for text in rendered)
                    score = (shown, sum(text is not None for text in rendered))
                    if score > most:
                        most, self.call, self._calling = score, call, tools
                if most[0] == len(_CALLING):
                    return
            if most[0]:
                return

    def _find(self, role: str, chats: tuple[str, ...]) -> _Found:
        silent: list[str] = []
        failure = ""
        for chat in chats:
            string = self._try(chat, role, _STRING)
            failure = failure or self._failure
            parts = self._try(chat, role, _PARTS)
            if _has(string, _FIRST):
                return _Found("either" if _has(parts, _FIRST, _SECOND) else "string", chat, silent, failure)
            part = self._try(chat, role, _PART)
            if _has(part, _FIRST):
                return _Found("parts" if _has(parts, _FIRST, _SECOND) else "part", chat, silent, failure)
            if (string, parts, part) != (None, None, None):
                silent.append(chat)
        return _Found(None, "", silent, failure)

    def _shows_as_user(self, chat: str) -> bool:
        text = self._try(chat, "user", as_content(_STRING, self.forms.get("user", "string")))
        # A template that fails looks at least at it.
        return text is None or _FIRST in text

    def _try(
        self, chat: str, role: str = "", content: Content = _STRING, call: dict[str, Any] | None = None
    ) -> str | None:
        """The rendered text, None if the template fails: then `_failure` says how."""
        form: ContentForm = "string" if isinstance(content, str) else "parts"
        messages: list[dict[str, Any]] = []
        for word in chat.removeprefix("tools ").split():
            if word == "X":
                messages.append(_message(role, content))
            elif word == "call":
                messages.append(call or self.call)
            else:
                messages.append(_message(word, as_content(_FILLER, self.forms.get(word, form))))
        try:
            return self._render(messages, [_TOOL] if chat.startswith("tools") else None)
        except ContextLengthExceeded:
            return ""
        except PrepareError as error:
            reason = error.__cause__ or error
            if isinstance(reason, MemoryError):
                raise TemplateError("the chat template takes all memory for a short chat", "messages") from error
            self._failure = " ".join(str(reason).split())[:_SAID_CHARS] or type(reason).__name__
            return None


def _with_id(call: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {**call, "id": call_id}


def _has(text: str | None, *marks: str) -> bool:
    return text is not None and _RAW not in text and all(mark in text for mark in marks)


def _prints_none(null: str | None, empty: str | None) -> bool:
    return null is not None and empty is not None and null.lower().count("none") > empty.lower().count("none")


def _message(role: str, content: Content) -> dict[str, Any]:
    message = {"role": role, "content": content}
    return {**message, "tool_call_id": _CALL_ID, "name": _FUNCTION} if role == "tool" else message


def _calling(content: str | None, arguments: dict[str, str] | str) -> dict[str, Any]:
    function = {"name": _FUNCTION, "arguments": arguments}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}
