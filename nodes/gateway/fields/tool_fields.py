"""Tools of a conversation: which are offered, which the model may or must call. Those of a chat's body, too. Pure."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from nodes.gateway.errors import BadRequest, invalid
from nodes.gateway.fields.openai_types import ChatCompletionBody
from nodes.gateway.fields.tool_types import (
    MAX_TOOLS,
    CallOneOf,
    CallThis,
    FunctionDefinition,
    NamedFunction,
    Tool,
)

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


class Choice(NamedTuple):
    """What a client says of calls, in the field `param`: `mode` as in `ToolUse`, or that there is to be none.

    `named` are the tools that may be called, by the fields that name them; None: all.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    named: Mapping[str, str] | None = None
    one_call: bool = False
    param: str = "tool_choice"


def tool_use(
    functions: Mapping[str, FunctionDefinition],
    choice: Choice,
    *,
    param: str = "tools",
    schema: str = "parameters",
    shown_late: Collection[str] = (),
) -> ToolUse:
    """The use of `functions`, each under the field that it is in. Raises BadRequest.

    `param` is the field of all of them, `schema` that of a function's parameters. Those of the names `shown_late` the
    template does not get.
    """
    if not functions:
        if choice.mode in ("required", "named") or choice.named is not None:
            raise _without_tools(choice.param, param)
        return NO_TOOLS
    shown = _checked(functions, param)
    if choice.mode == "none":
        # Not shown: a model that is shown tools may call one of them.
        return NO_TOOLS
    if shown_late:
        shown = shown_tools(one for one in functions.values() if one.name not in shown_late)
    offered = [
        OfferedTool(one.name, one.parameters or {}, bool(one.strict), f"{where}.{schema}")
        for where, one in functions.items()
    ]
    use = ToolUse(shown, offered, choice.mode, choice.one_call, param=param)
    if choice.named is None:
        return use
    chosen = [_named(offered, name, where) for where, name in choice.named.items()]
    narrowed = [tool for tool in offered if tool in chosen]
    if choice.mode == "named":
        return use._replace(offered=narrowed, one_call=True)
    return use._replace(offered=narrowed, is_narrowed=len(narrowed) < len(offered))


def tools_of(body: ChatCompletionBody) -> ToolUse:
    """Raises BadRequest."""
    if body.functions:
        return _of_functions(body, body.functions)
    if body.function_call not in (None, "none", "auto"):
        raise _without_tools("function_call", "functions")
    if body.tools is None and body.tool_choice is None:
        # Most chats.
        return NO_TOOLS
    one_call = body.parallel_tool_calls is False
    match body.tool_choice:
        case CallThis(function=function):
            choice = Choice("named", {"tool_choice.function.name": function.name}, one_call)
        case CallOneOf(allowed_tools=allowed):
            where = "tool_choice.allowed_tools.tools"
            named = {f"{where}.{index}.function.name": tool.function.name for index, tool in enumerate(allowed.tools)}
            choice = Choice(allowed.mode, named, one_call)
        case mode:
            choice = Choice(mode or "auto", None, one_call)
    return tool_use(functions_of(body.tools or ()), choice)


def functions_of(tools: Sequence[Tool]) -> dict[str, FunctionDefinition]:
    """For `tool_use`."""
    return {f"tools.{index}.function": tool.function for index, tool in enumerate(tools)}


def _of_functions(body: ChatCompletionBody, functions: Sequence[FunctionDefinition]) -> ToolUse:
    """The deprecated form: at most one call."""
    if body.tools:
        raise invalid("Give 'tools' or 'functions', not both.", "functions")
    if body.tool_choice not in (None, "none", "auto"):
        raise _without_tools("tool_choice", "tools")
    match body.function_call:
        case NamedFunction(name=name):
            choice = Choice("named", {"function_call.name": name}, one_call=True)
        case mode:
            choice = Choice(mode or "auto", one_call=True)
    use = tool_use({f"functions.{index}": one for index, one in enumerate(functions)}, choice, param="functions")
    return use._replace(is_legacy=True) if use.offered else use


def _without_tools(param: str, tools: str) -> BadRequest:
    return invalid(f"'{param}' needs '{tools}': none are given.", param)


def _named(offered: Collection[OfferedTool], name: str, param: str) -> OfferedTool:
    found = next((tool for tool in offered if tool.name == name), None)
    if found is None:
        has = ", ".join(tool.name for tool in offered)
        raise invalid(f"'{param}' is '{name[:100]}', which is none of the tools that are given: {has[:1000]}.", param)
    return found


def _checked(functions: Mapping[str, FunctionDefinition], param: str) -> bytes:
    """What a chat template gets of all. Raises BadRequest."""
    if len(functions) > MAX_TOOLS:
        raise invalid(f"'{param}' are {len(functions)} functions; at most {MAX_TOOLS} can be served.", param)
    names: set[str] = set()
    for where, function in functions.items():
        if function.name in names:
            raise invalid(f"'{where}.name' is '{function.name}', as an earlier one is.", f"{where}.name")
        names.add(function.name)
    try:
        shown = shown_tools(functions.values())
    except RecursionError:
        raise invalid(f"'{param}' is nested too deeply.", param) from None
    if len(shown) > MAX_TOOL_BYTES:
        raise invalid(f"'{param}' takes {len(shown)} bytes; at most {MAX_TOOL_BYTES} can be served.", param)
    return shown


def shown_tools(functions: Iterable[FunctionDefinition]) -> bytes:
    """What a chat template gets of them."""
    return f"[{','.join(map(shown_tool, functions))}]".encode()


def shown_tool(function: FunctionDefinition) -> str:
    """A tool as templates take it: without what is null, and with parameters, which some of them look into."""
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    # Not by msgspec, which does not write the integers beyond 64 bits that it reads.
    return json.dumps({"type": "function", "function": shown}, ensure_ascii=False, separators=(",", ":"))
