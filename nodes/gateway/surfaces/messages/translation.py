"""A body of the Messages API as the body of a chat. Pure."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from nodes.gateway.errors import BadRequest
from nodes.gateway.surfaces.messages.turns import chat_messages
from nodes.gateway.surfaces.messages.types import (
    CountTokensBody,
    JsonSchemaFormat,
    MessagesBody,
    MessagesTool,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoice,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
)

_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Models that take an effort know three."""

_SEARCH_OF_THE_SERVER: Final = "tool_search_tool_"

_NUMBERED: Final = re.compile(r"(tools|messages)\.(\d+)(?=\.|$)")


class Translated(NamedTuple):
    """The body of a chat; for each of its messages and its tools the field of the original that it was made from; types
    of tools that are not offered; names of tools that only results show that refer to them.
    """

    chat: dict[str, Any]
    messages_from: Sequence[str]
    tools_from: Sequence[str]
    skipped_tools: Sequence[str]
    loaded_tools: Collection[str]

    def name_of(self, param: str) -> str:
        """What a message or tool of the chat was made from."""
        found = _NUMBERED.match(param)
        made_from = self.tools_from if found is not None and found[1] == "tools" else self.messages_from
        if found is None or int(found[2]) >= len(made_from):
            return param
        # What is inside of a message has other names here.
        return made_from[int(found[2])] + (param[found.end() :] if found[1] == "tools" else "")


def chat_of(body: CountTokensBody) -> Translated:
    """Raises BadRequest, naming the field of `body`."""
    offered, skipped = _tools(body.tools or ())
    loaded = _loaded_late([tool for _, tool in offered], skipped, body.tool_choice)
    messages, messages_from = chat_messages(body.system, body.messages, loaded=loaded)
    chat: dict[str, Any] = {"messages": messages}
    if body.model is not None:
        chat["model"] = body.model
    if offered:
        chat["tools"] = [_function(tool) for _, tool in offered]
    _add_tool_choice(chat, body)
    _add_thinking(chat, body)
    form = body.output_config.format if body.output_config is not None else None
    if (form := form or body.output_format) is not None:
        chat["response_format"] = _response_format(form)
    if body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = _EFFORTS[body.output_config.effort]
    if messages[-1]["role"] == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body, MessagesBody):
        chat |= _sampling(body)
    return Translated(chat, messages_from, [f"tools.{number}" for number, _ in offered], skipped, loaded.keys())


def _sampling(body: MessagesBody) -> dict[str, Any]:
    # A request draws at least one token: of one that asks for none, nothing is shown.
    fields = {
        "max_tokens": max(body.max_tokens, 1),
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "cache_salt": body.cache_salt,
        "extra_key": body.extra_key,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tools(tools: Sequence[MessagesTool]) -> tuple[list[tuple[int, MessagesTool]], list[str]]:
    offered: list[tuple[int, MessagesTool]] = []
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


def _loaded_late(tools: Sequence[MessagesTool], skipped: Sequence[str], choice: ToolChoice | None) -> dict[str, str]:
    """By name, what a result says in the place of a reference to a tool that is loaded late.

    At the prompt's beginning tools that a search has found would change it, and nothing of the conversation could be
    read from the cache. There some tool has to be left, since only then templates say how one is called; one that has
    to be called is; and all are, if the client leaves the search to the server, which has none.
    """
    named = choice.name if isinstance(choice, ToolChoiceTool) else None
    late = [tool for tool in tools if tool.defer_loading and tool.name != named]
    if len(late) == len(tools) or any(kind.startswith(_SEARCH_OF_THE_SERVER) for kind in skipped):
        return {}
    return {
        tool.name: f"{tool.name} can be called from here on: {msgspec.json.encode(_function(tool)).decode()}"
        for tool in late
    }


def _function(tool: MessagesTool) -> dict[str, Any]:
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
        chat["enable_thinking"] = isinstance(body.thinking, ThinkingEnabled)


def hides_thinking(body: CountTokensBody) -> bool:
    """Reasoning is generated and only its signature shown."""
    thinking = body.thinking
    return isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"


def _response_format(form: JsonSchemaFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema, "strict": True}}
