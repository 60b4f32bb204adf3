"""A body of the Messages API as the body of a chat, and errors about the chat as errors about that body. Pure."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nodes.gateway.errors import ApiError, BadRequest
from nodes.gateway.surfaces.messages.turns import chat_messages
from nodes.gateway.surfaces.messages.types import (
    CountTokensBody,
    JsonSchemaFormat,
    MessagesBody,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
)

_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Models that take an effort know three."""

_NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "max_completion_tokens": "max_tokens",
}
"""Fields of chats, and what they are made from."""


class Translated(NamedTuple):
    """The body of a chat; by number of its tool, the number that the tool has in the original; types of tools that are
    not offered.
    """

    chat: dict[str, Any]
    tool_numbers: Sequence[int]
    skipped_tools: Sequence[str]


def chat_of(body: CountTokensBody, *, keep_attribution: bool) -> Translated:
    """Raises BadRequest, naming the field of `body`."""
    chat: dict[str, Any] = {"messages": chat_messages(body.system, body.messages, keep_attribution=keep_attribution)}
    if body.model is not None:
        chat["model"] = body.model
    offered, skipped = _tools(body.tools or ())
    if offered:
        chat["tools"] = [_function(tool) for _, tool in offered]
    _add_tool_choice(chat, body)
    _add_thinking(chat, body)
    form = body.output_config.format if body.output_config is not None else None
    if (form := form or body.output_format) is not None:
        chat["response_format"] = _response_format(form)
    if body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = _EFFORTS[body.output_config.effort]
    if chat["messages"][-1]["role"] == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesBody):
        chat |= _sampling(body)
    return Translated(chat, [number for number, _ in offered], skipped)


def _sampling(body: MessagesBody) -> dict[str, Any]:
    # A request draws at least one token: of one that asks for none, nothing is shown.
    fields = {
        "max_tokens": max(body.max_tokens, 1),
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tools(tools: Sequence[Tool]) -> tuple[list[tuple[int, Tool]], list[str]]:
    offered: list[tuple[int, Tool]] = []
    skipped: list[str] = []
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            skipped.append(tool.type)
        elif tool.input_schema is None:
            param = f"tools.{number}.input_schema"
            raise BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
        else:
            offered.append((number, tool))
    if skipped and not offered:
        # Beside others such a tool is a help that the model does without; alone it is what the call is about.
        message = f"Tools of type '{skipped[0][:64]}' are not supported by this server; give tools an input_schema."
        raise BadRequest(message, param="tools.0.type", code="unsupported_parameter")
    return offered, skipped


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _add_tool_choice(chat: dict[str, Any], body: CountTokensBody) -> None:
    match body.tool_choice:
        case None:
            return
        case ToolChoiceNone():
            chat["tool_choice"] = "none"
            return
        case ToolChoiceAuto():
            chat["tool_choice"] = "auto"
        case ToolChoiceAny():
            chat["tool_choice"] = "required"
        case ToolChoiceTool(name=name):
            if name not in {tool["function"]["name"] for tool in chat.get("tools", ())}:
                message = f"'tool_choice.name' is {name[:128]!r}, which is not among the tools that are offered."
                raise BadRequest(message, param="tool_choice.name", code="invalid_value")
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    if body.tool_choice.disable_parallel_tool_use is not None:
        chat["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use


def _add_thinking(chat: dict[str, Any], body: CountTokensBody) -> None:
    if isinstance(body.thinking, ThinkingEnabled | ThinkingDisabled):
        thinks = isinstance(body.thinking, ThinkingEnabled)
        # Of templates some ask for the one, some for the other.
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}


def hides_thinking(body: CountTokensBody) -> bool:
    """Reasoning is generated and only its signature shown."""
    thinking = body.thinking
    return isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"


def _response_format(form: JsonSchemaFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema, "strict": True}}


def rename(error: ApiError, translated: Translated) -> None:
    """Make an error about a chat one about the body that it was made from."""
    if error.param is not None:
        ours = _name_of(error.param, translated)
        error.message = error.message.replace(f"'{error.param}'", f"'{ours}'")
        error.param = ours


def _name_of(param: str, translated: Translated) -> str:
    first, *rest = param.split(".")
    if first == "tools" and rest and rest[0].isdigit() and int(rest[0]) < len(translated.tool_numbers):
        inner = [one for one in rest[1:] if one != "function"]
        inner = ["input_schema" if one == "parameters" and at == 0 else one for at, one in enumerate(inner)]
        return ".".join(["tools", str(translated.tool_numbers[int(rest[0])]), *inner])
    if first == "tool_choice":
        return ".".join(one for one in (first, *rest) if one != "function")
    if first == "response_format":
        return _NAMES[first]
    return ".".join((_NAMES.get(first, first), *rest))
