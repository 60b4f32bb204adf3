"""What a chat's body says of tools: which are offered, which the model may or must call. Pure."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.openai_types import ChatCompletionBody
from nodes.gateway.fields.tool_types import CallOneOf, CallThis, FunctionDefinition, NamedFunction, Tool

MAX_TOOL_BYTES: Final = 1 << 20
"""Of one chat's tools: a prompt of 100,000 tokens. It is rendered by a process that others wait for."""


class OfferedTool(NamedTuple):
    """A function that may be called; with `strict` its arguments are kept within `parameters`, the field `param`."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    param: str = ""


class ToolUse(NamedTuple):
    """The tools of a call. `rendered` is what the chat template gets, empty if it is to show none.

    `mode`: whether the model may call one of `offered`, has to, or has to call the only one of them (`named`). With
    `one_call` it calls no second one. `is_legacy`: the answer has a `function_call`. `param` names the field.
    `is_narrowed`: not all that are rendered may be called.
    """

    rendered: bytes = b""
    offered: Sequence[OfferedTool] = ()
    mode: Literal["auto", "required", "named"] = "auto"
    one_call: bool = False
    is_legacy: bool = False
    param: str = "tools"
    is_narrowed: bool = False

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode != "auto"


NO_TOOLS: Final = ToolUse()


def tools_of(body: ChatCompletionBody) -> ToolUse:
    """Raises BadRequest."""
    if body.functions:
        return _of_functions(body, body.functions)
    if body.function_call not in (None, "none", "auto"):
        raise _without_tools("function_call", "functions")
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise _without_tools("tool_choice", "tools")
        return NO_TOOLS
    functions, rendered = [tool.function for tool in body.tools], shown_tools(body.tools)
    choice = body.tool_choice or "auto"
    if choice == "none":
        # Not shown: a model that is shown tools may call one of them.
        return NO_TOOLS
    offered = [_offered(function, f"tools.{index}.function") for index, function in enumerate(functions)]
    use = ToolUse(rendered, offered, one_call=body.parallel_tool_calls is False)
    match choice:
        case CallThis():
            named = _named(offered, choice.function.name, "tool_choice.function.name")
            return use._replace(offered=[named], mode="named", one_call=True)
        case CallOneOf():
            allowed = choice.allowed_tools
            chosen = [
                _named(offered, tool.function.name, f"tool_choice.allowed_tools.tools.{index}.function.name")
                for index, tool in enumerate(allowed.tools)
            ]
            narrowed = [tool for tool in offered if tool in chosen]
            return use._replace(offered=narrowed, mode=allowed.mode, is_narrowed=len(narrowed) < len(offered))
        case "required":
            return use._replace(mode="required")
        case _:
            return use


def shown_tools(tools: Sequence[Tool]) -> bytes:
    """What a chat template gets of them. Raises BadRequest."""
    return _rendered([tool.function for tool in tools], "tools", ".function")


def without(rendered: bytes, names: Collection[str]) -> bytes:
    """What a chat template gets of `rendered` if tools of these names are shown elsewhere."""
    return _as_json([tool for tool in json.loads(rendered) if tool["function"]["name"] not in names])


def _of_functions(body: ChatCompletionBody, functions: Sequence[FunctionDefinition]) -> ToolUse:
    """The deprecated form: at most one call."""
    if body.tools:
        raise BadRequest("Give 'tools' or 'functions', not both.", param="functions", code="invalid_value")
    if body.tool_choice not in (None, "none", "auto"):
        raise _without_tools("tool_choice", "tools")
    rendered = _rendered(functions, "functions", "")
    if body.function_call == "none":
        return NO_TOOLS
    offered = [_offered(function, f"functions.{index}") for index, function in enumerate(functions)]
    use = ToolUse(rendered, offered, one_call=True, is_legacy=True, param="functions")
    if isinstance(body.function_call, NamedFunction):
        named = _named(offered, body.function_call.name, "function_call.name")
        return use._replace(offered=[named], mode="named")
    return use


def _without_tools(param: str, tools: str) -> BadRequest:
    return BadRequest(f"'{param}' needs '{tools}': none are given.", param=param, code="invalid_value")


def _named(offered: Collection[OfferedTool], name: str, param: str) -> OfferedTool:
    found = next((tool for tool in offered if tool.name == name), None)
    if found is None:
        has = ", ".join(tool.name for tool in offered)
        message = f"'{param}' is '{name[:100]}', which is none of the tools that are given: {has[:1000]}."
        raise BadRequest(message, param=param, code="invalid_value")
    return found


def _offered(function: FunctionDefinition, where: str) -> OfferedTool:
    return OfferedTool(function.name, function.parameters or {}, bool(function.strict), f"{where}.parameters")


def _rendered(functions: Sequence[FunctionDefinition], param: str, within: str) -> bytes:
    """The tools as templates take them: without what is null, and with parameters, which some of them look into."""
    names: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in names:
            where = f"{param}.{index}{within}.name"
            raise BadRequest(
                f"'{where}' is '{function.name}', as an earlier one is.", param=where, code="invalid_value"
            )
        names.add(function.name)
    tools: list[Any] = []
    for function in functions:
        shown: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            shown["description"] = function.description
        shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": shown})
    try:
        rendered = _as_json(tools)
    except RecursionError:
        raise BadRequest(f"'{param}' is nested too deeply.", param=param, code="invalid_value") from None
    if len(rendered) > MAX_TOOL_BYTES:
        message = f"'{param}' takes {len(rendered)} bytes; at most {MAX_TOOL_BYTES} can be served."
        raise BadRequest(message, param=param, code="invalid_value")
    return rendered


def _as_json(tools: Sequence[Any]) -> bytes:
    # Not by msgspec, which does not write the integers beyond 64 bits that it reads.
    return json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode()


def template_variables(body: ChatCompletionBody) -> dict[str, Any]:
    """Variables of chat templates that fields of a body stand for, under the names that templates know."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        # Templates know one of two names (Qwen's, DeepSeek's); one that knows neither ignores both.
        thinks = body.reasoning_effort != "none"
        variables |= {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            variables["reasoning_effort"] = body.reasoning_effort
    if body.enable_thinking is not None:
        variables |= {"enable_thinking": body.enable_thinking, "thinking": body.enable_thinking}
    return variables


def template_kwargs(body: ChatCompletionBody) -> bytes | None:
    """All variables for the template; those that a client gives by their own name go before those that follow."""
    given = template_variables(body) | (body.chat_template_kwargs or {})
    return msgspec.json.encode(given) if given else None
