"""Renders a model's chat template as transformers does: same environment, same globals, same result.

The template is data from disk, so it runs in jinja's immutable sandbox and sees nothing but JSON values. The sandbox
keeps it from the interpreter; it does not bound its time and memory, which `render_child.py` does. Pure; text is
counted as it comes, so the output is bounded here. Used by `nodes/tokenizer/child/rendering.py` and `render_child.py`.
"""

import datetime
import json
from typing import Any, Final, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.utils
import msgspec
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mesh.wire.message import Part
from nodes.tokenizer.errors import ContextLengthExceeded, TemplateError
from nodes.tokenizer.templates.chat_messages import (
    late_system_as_user,
    parse_messages,
    parse_template_kwargs,
    parse_tools,
    with_users_joined,
)
from nodes.tokenizer.templates.dialect import text_of, with_mark
from nodes.tokenizer.templates.probe import probe_template

FIELD_VARIABLES: Final = frozenset({"documents", "verbosity"})
"""Variables of templates that requests have fields of their own for."""
_SHOWN_CHARS: Final = 500
"""An error of jinja has a line or two; one that quotes a chat must not fill an answer with it."""
_FINAL_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_ROLE_MARK: Final = " DOES_THE_TEMPLATE_SHOW_THIS_ROLE"
_COMMON_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
_PROBE_CHARS: Final = 1 << 20
"""A hundred times what short chats render to, with a template's longest preamble; more is a loop."""
_MAX_SHOWN_ROLES: Final = 64
"""Clients choose the names of roles, and many templates show any role: at most this many are remembered."""


class ChatRequest(Part, frozen=True):
    """A chat as in `nodes.protocol.Prepare`; its text may have `max_chars`, if that is more than the template's own."""

    chat: bytes
    tools: bytes | None = None
    chat_template_kwargs: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_chars: int = 0
    late_system_as_user: bool = False


class ChatTemplate:
    """One compiled template. Its `dialect` is found when it is made.

    Args:
        source: the template's text. Raises TemplateError if it is not one, or does not show what a user says.
        special_tokens: variables that it may use, such as `bos_token`.
        max_chars: rendering stops here.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], max_chars: int) -> None:
        self._special_tokens = special_tokens
        self._max_chars = max_chars
        self._reads_content = "content" in source
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # a template may be wrong in any way: jinja's compiler raises what it meets
            raise TemplateError(f"the model's chat template cannot be compiled: {_shown(error)}", "messages") from error
        self.dialect = msgspec.structs.replace(probe_template(self._probe), reads=_read_by(source))
        self._shown_roles = {"user", *self.dialect.forms}

    def render(self, request: ChatRequest) -> str:
        """Raises TemplateError, UnsupportedContent or ContextLengthExceeded."""
        messages = parse_messages(request.chat, self.dialect)
        if request.late_system_as_user and not self.dialect.shows_late_system:
            messages = late_system_as_user(messages, self.dialect)
        if self.dialect.joins_users:
            messages = with_users_joined(messages, self.dialect)
        # What is said beside calls some templates leave out by design, Hermes' for one.
        said = [one for one in messages if not one.get("tool_calls") and text_of(one.get("content")).strip()]
        spoken = {message["role"] for message in said}
        for role in self.dialect.left_out:
            if role in spoken:
                raise _unknown_role(role)
        if request.continue_final_message:
            self._mark_end(messages)
        variables = {
            **self._special_tokens,
            "documents": None,
            **parse_template_kwargs(request.chat_template_kwargs),
            "messages": messages,
            "tools": parse_tools(request.tools),
            "add_generation_prompt": request.add_generation_prompt and not request.continue_final_message,
        }
        text = self._generate(variables, max(self._max_chars, request.max_chars))
        self._check_roles(variables, spoken)
        self._check_places(variables, text)
        return _cut_at_mark(text) if request.continue_final_message else text

    def _probe(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        chat = {"documents": None, "messages": messages, "tools": tools, "add_generation_prompt": True}
        return self._generate({**self._special_tokens, **chat}, _PROBE_CHARS)

    def _generate(self, variables: dict[str, Any], max_chars: int) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > max_chars:
                    break
                pieces.append(piece)
        except Exception as error:  # whatever a template does wrong is its request's error, nobody else's
            message = f"The chat does not fit the model's template: {_shown(error)}"
            odd = sorted({one["role"] for one in variables["messages"]} - _COMMON_ROLES)
            if odd and not any(role in message for role in odd):
                message += f" (a message has the role {odd[0]!r})"
            raise TemplateError(message, "messages") from error
        if num_chars > max_chars:
            raise ContextLengthExceeded(f"the messages are over {max_chars} characters", "messages")
        return "".join(pieces)

    def _check_roles(self, variables: dict[str, Any], spoken: set[str]) -> None:
        """Raise TemplateError for a role whose messages the template leaves out but would show if they were a user's.
        Found by rendering again with a mark, once for each role that no probe has shown: many templates take any.
        """
        for role in sorted(spoken - self._shown_roles):
            if self._shows(variables, role, role):
                if len(self._shown_roles) < _MAX_SHOWN_ROLES:
                    self._shown_roles.add(role)
            elif self._shows(variables, role, "user"):
                raise _unknown_role(role)

    def _check_places(self, variables: dict[str, Any], text: str) -> None:
        """Raise TemplateError for words of people that the template shows elsewhere, but not where they stand: many
        show a system message in the first place only. Of assistants' and tools' messages parts are left out by
        design.
        """
        at, unseen = 0, list[int]()
        for i, one in enumerate(variables["messages"]):
            words = text_of(one.get("content")).strip() if one["role"] in ("system", "developer", "user") else ""
            # Searched from the last one's on, since chats are shown in order: the text is gone through once.
            found = text.find(words, at)
            found = text.find(words) if found < 0 else found
            if found >= 0:
                at = found
            else:
                unseen.append(i)
        # A template may also have changed the words. All at once: one rendering for each of a thousand messages would
        # take longer than a rendering may.
        unseen = sorted({*unseen} - self._shown_of(variables, unseen, "")) if unseen else []
        for i in sorted(self._shown_of(variables, unseen, "user")) if unseen else ():
            raise TemplateError(
                f"the model's chat template leaves out messages[{i}], of the role {variables['messages'][i]['role']!r}:"
                " it shows such messages in other places only",
                "messages",
            )

    def _shows(self, variables: dict[str, Any], role: str, as_role: str) -> bool:
        """Whether contents of messages of `role` show in the rendered text if their role is changed to `as_role`."""
        chosen = [i for i, one in enumerate(variables["messages"]) if one["role"] == role and one.get("content")]
        return bool(self._shown_of(variables, chosen, as_role))

    def _shown_of(self, variables: dict[str, Any], chosen: list[int], as_role: str) -> set[int]:
        """Which of the messages with these numbers show, in the role `as_role` or "" for their own."""
        messages = list(variables["messages"])
        # Words of the chat itself must not be taken for the mark.
        mark = _ROLE_MARK
        while any(mark.strip() in text_of(one.get("content")) for one in messages):
            mark += "_"
        for i in chosen:
            content = with_mark(messages[i]["content"], f"{mark}{i}.")
            messages[i] = {**messages[i], "role": as_role or messages[i]["role"], "content": content}
        try:
            text = self._generate({**variables, "messages": messages}, self._max_chars)
        except (TemplateError, ContextLengthExceeded):
            # The template at least looks at them.
            return {*chosen}
        return {i for i in chosen if f"{mark.strip()}{i}." in text}

    def _mark_end(self, messages: list[dict[str, Any]]) -> None:
        content = messages[-1].get("content")
        if content in (None, []) or not self._reads_content:
            raise TemplateError("continue_final_message: the last message has no content to continue", "messages")
        messages[-1] = {**messages[-1], "content": with_mark(content, _FINAL_TAG)}


class _Dict:
    """`dict(...)` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` for templates, without underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Like jinja's: no named parameters, so that `namespace(self=...)` works.
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns from; for serving it is a scope like any other."""

    tags = {"generation"}  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": _format_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    cast("dict[str, Any]", environment.globals).update(names)
    return environment


def _read_by(source: str) -> tuple[str, ...]:
    """Which of `FIELD_VARIABLES` the template reads without having set them itself."""
    return tuple(sorted(FIELD_VARIABLES & jinja2.meta.find_undeclared_variables(_environment().parse(source))))


def _unknown_role(role: str) -> TemplateError:
    return TemplateError(
        f"the model's chat template does not know the role {role!r}: it leaves out such messages", "messages"
    )


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_FINAL_TAG.strip())
    if end < 0:
        raise TemplateError("continue_final_message: the template does not show the last message unchanged", "messages")
    # A template that trims contents has removed the mark's own space, and would have removed the message's.
    return text[:end] if text.startswith(_FINAL_TAG, end) else text[:end].rstrip()


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template cannot set {name!r}")


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model was not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # local time, as transformers has it


def _shown(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_SHOWN_CHARS]
