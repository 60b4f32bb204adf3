"""A body of the Messages API as a conversation, and what its answer is to be as `ChatOptions`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from nodes.asks.grammar_fields import JsonSchemaFormat, NamedSchema
from nodes.gateway.errors import Names, required, unsupported
from nodes.gateway.fields.body_reader import Decoded
from nodes.gateway.fields.conversation import Conversation
from nodes.gateway.fields.openai_types import CHAT_OPTIONS
from nodes.gateway.fields.tool_fields import Choice, shown_tool, tool_use
from nodes.gateway.fields.tool_types import FunctionDefinition
from nodes.gateway.surfaces.messages.turns import turns_of
from nodes.gateway.surfaces.messages.types import (
    CountTokensBody,
    MessagesBody,
    MessagesTool,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
)

NAMES: Final[Names] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
}
"""By field of `ChatOptions`: the field that it is made of, if it has another name."""

_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high", None: None}
"""Models that take an effort know three."""

_SEARCH_OF_THE_SERVER: Final = "tool_search_tool_"


class Translated(NamedTuple):
    """A body, its conversation, and `ChatOptions`."""

    body: CountTokensBody
    conversation: Conversation
    options: Decoded


def translate(decoded: Decoded) -> Translated:
    """Raises BadRequest, naming the field of the body."""
    body: CountTokensBody = decoded.body
    offered, skipped = _tools(body.tools or ())
    functions = {where: _function(tool) for where, tool in offered.items()}
    loaded = _loaded_late(offered, skipped, body.tool_choice)
    turns = turns_of(body.system, body.messages, loaded=loaded)
    tools = tool_use(functions, _choice(body.tool_choice), schema="input_schema", shown_late=loaded)
    # Claude Code says something as the system after each result of a tool.
    conversation = Conversation(turns=turns, tools=tools, late_system_as_user=True)
    options = _options_of(body)
    if turns[-1].role == "assistant":
        options |= {"add_generation_prompt": False, "continue_final_message": True}
    unknown = [*decoded.unknown_fields, *(f"tools.type:{kind[:64]}" for kind in dict.fromkeys(skipped))]
    return Translated(body, conversation, Decoded(CHAT_OPTIONS(**options), options, unknown))


def _options_of(body: CountTokensBody) -> dict[str, Any]:
    output, thinking = body.output_config, body.thinking
    form = (output and output.format) or body.output_format
    options: dict[str, Any] = {
        "model": body.model,
        "enable_thinking": isinstance(thinking, ThinkingEnabled)
        if isinstance(thinking, ThinkingEnabled | ThinkingDisabled)
        else None,
        "response_format": form
        and JsonSchemaFormat(json_schema=NamedSchema(name="answer", schema=form.schema, strict=True)),
        "reasoning_effort": _EFFORTS[output and output.effort],
    }
    if isinstance(body, MessagesBody):
        options |= {
            # A request draws at least one token: of one that asks for none, nothing is shown.
            "max_tokens": max(body.max_tokens, 1),
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "cache_salt": body.cache_salt,
            "extra_key": body.extra_key,
        }
    return options


def _tools(tools: Sequence[MessagesTool]) -> tuple[dict[str, MessagesTool], list[str]]:
    offered: dict[str, MessagesTool] = {}
    skipped: list[str] = []
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            skipped.append(tool.type)
        else:
            required(tool.input_schema, f"tools.{number}.input_schema")
            offered[f"tools.{number}"] = tool
    if skipped and not offered:
        # Beside others such a tool is a help that the model does without; alone it is what the call is about.
        message = f"Tools of type '{skipped[0][:64]}' are not supported by this server; give tools an input_schema."
        raise unsupported(message, "tools.0.type")
    return offered, skipped


def _loaded_late(
    offered: Mapping[str, MessagesTool], skipped: Sequence[str], choice: ToolChoice | None
) -> dict[str, str]:
    """By name, what a result says in the place of a reference to a tool that is loaded late.

    At the prompt's beginning tools that a search has found would change it, and nothing of the conversation could be
    read from the cache. There some tool has to be left, since only then templates say how one is called; one that has
    to be called is; and all are, if the client leaves the search to the server, which has none.
    """
    named = choice.name if isinstance(choice, ToolChoiceTool) else None
    late = [tool for tool in offered.values() if tool.defer_loading and tool.name != named]
    if len(late) == len(offered) or any(kind.startswith(_SEARCH_OF_THE_SERVER) for kind in skipped):
        return {}
    return {tool.name: f"{tool.name} can be called from here on: {shown_tool(_function(tool))}" for tool in late}


def _function(tool: MessagesTool) -> FunctionDefinition:
    return FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )


def _choice(choice: ToolChoice | None) -> Choice:
    if choice is None or isinstance(choice, ToolChoiceNone):
        return Choice("auto" if choice is None else "none")
    one_call = bool(choice.disable_parallel_tool_use)
    if isinstance(choice, ToolChoiceTool):
        return Choice("named", {"tool_choice.name": choice.name}, one_call, "tool_choice.name")
    return Choice("required" if isinstance(choice, ToolChoiceAny) else "auto", None, one_call)


def hides_thinking(body: CountTokensBody) -> bool:
    """Reasoning is generated and only its signature shown."""
    thinking = body.thinking
    return isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"
