"""How the served model writes reasoning and calls: which parsers read it, and which of their marks a tokenizer calls
special. By the operator's flags, else by the model's chat template, which a tokenizer has.
"""

from typing import NamedTuple

from mesh.actor import Answer
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import Internal, unsupported
from nodes.gateway.fields.tool_fields import ToolUse
from nodes.gateway.parsers import (
    CALLS,
    HARMONY,
    NO_PARSER,
    OfferedTools,
    ParserNames,
    ParserUnusable,
    marks_of,
    parser_of_template,
)
from nodes.gateway.parsers.written import CallForm
from nodes.protocol import TemplateIs


class AnswerForm(NamedTuple):
    """`mark_ids` are the marks that are tokens of their own: they must reach the parsers even if they are special, and
    no letters stand for them. `short_ids`: the template takes ids of nine characters alone. `shows_tools`: it renders
    the tools that a request offers. `call_form`: how calls are written, if a parser of our own reads them.
    """

    names: ParserNames = ParserNames()
    mark_ids: tuple[tuple[str, int], ...] = ()
    short_ids: bool = False
    shows_tools: bool = False
    call_form: CallForm | None = None

    @property
    def shown_ids(self) -> list[int]:
        """Tokens that are part of an answer's text."""
        return [token_id for _, token_id in self.mark_ids]

    def check_tools(self, use: ToolUse) -> None:
        """Raise BadRequest if the model cannot be shown tools, or calls of it cannot be read."""
        if not use.rendered:
            return
        if not self.shows_tools:
            message = (
                f"'{use.param}' is not supported by this model: its chat template does not show tools. The operator may"
                " give one that does (`--chat-template FILE`)."
            )
            raise unsupported(message, use.param)
        if self.names.calls is None:
            message = (
                f"'{use.param}' is not supported by this server: no parser reads calls as this model writes them."
                " The operator may name one (`--tool-call-parser`)."
            )
            raise unsupported(message, use.param)

    def is_parsed(self, tools: OfferedTools) -> bool:
        """Whether anything has to be looked for in an answer."""
        calls, reasoning = self.names
        return reasoning is not None or calls == HARMONY or (calls is not None and bool(tools))


def form_of(answer: Answer, config: GatewayConfig) -> AnswerForm:
    """Raises Internal if that is no answer, or for an installed parser that cannot be loaded."""
    said = answer.message
    if not isinstance(said, TemplateIs):
        raise Internal("A tokenizer gave an answer that does not match the request.")
    found = parser_of_template(said.template)
    names = ParserNames(
        _chosen(config.tool_call_parser, found.calls), _chosen(config.reasoning_parser, found.reasoning)
    )
    short_ids = names.calls in CALLS and CALLS[names.calls].short_ids
    try:
        # An installed parser is imported here, and may turn out to be none.
        marks = marks_of(names)
    except ParserUnusable as error:
        raise Internal(str(error)) from error
    mark_ids = tuple((mark, said.added_ids[mark]) for mark in marks if mark in said.added_ids)
    call_form = CALLS[names.calls].form_in(said.template) if names.calls in CALLS else None
    return AnswerForm(names, mark_ids, short_ids, said.shows_tools, call_form)


def _chosen(flag: str, found: str | None) -> str | None:
    return found if not flag else None if flag == NO_PARSER else flag
