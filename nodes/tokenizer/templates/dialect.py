"""What a chat template takes, as `template_probe.py` finds out, and contents in the forms that it takes. Pure."""

from typing import Any, Literal, TypeAlias

from mesh.wire.message import Part

ContentForm: TypeAlias = Literal["either", "string", "parts", "part"]
"""Contents whose text a template shows: strings and lists of parts; strings only; lists only; lists of one part."""

Content: TypeAlias = str | list[dict[str, Any]]


class TemplateDialect(Part, frozen=True):
    """Which roles and which forms of content a template knows.

    Args:
        forms: by role, the form of its contents; `developer` only if it is not treated like any made-up role.
        left_out: roles whose messages the template leaves out, though it would show them if they were a user's.
        refused: by role, what the template says if it fails for each such message.
        has_null_content: a message with tool calls and nothing else has null content, else an empty string.
        has_text_arguments: arguments of tool calls are JSON in a string, else an object.
        shows_tools: it renders the tools that a request offers.
        shows_late_system: it shows a system message that is not the first message, and in its place.
        joins_users: it refuses messages of the user that follow each other.
        has_short_ids: ids of calls have to be nine letters and digits.
        joins_reasoning: it refuses a message with calls that has both reasoning and content.
        reads: variables that it reads, of those that requests have fields of their own for.
    """

    forms: dict[str, ContentForm]
    left_out: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    has_null_content: bool = False
    has_text_arguments: bool = False
    shows_tools: bool = False
    shows_late_system: bool = False
    joins_users: bool = False
    has_short_ids: bool = False
    joins_reasoning: bool = False
    reads: tuple[str, ...] = ()

    def form(self, role: str) -> ContentForm:
        """How contents of `role` are written: as a user's, if the template is not known to show such messages."""
        return self.forms.get(role) or self.forms.get("user", "string")


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def as_content(sent: str | list[str], form: ContentForm) -> Content:
    """A string that a client sent, or the texts of the parts that it sent, in a form that the template shows."""
    if isinstance(sent, str):
        return sent if form in ("either", "string") else [text_part(sent)]
    if form in ("either", "parts"):
        return [text_part(text) for text in sent]
    return as_content("\n".join(sent), form)


def text_of(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def with_mark(content: Content, mark: str) -> Content:
    if isinstance(content, str):
        return content + mark
    return [*content[:-1], *(text_part(part["text"] + mark) for part in content[-1:])]
