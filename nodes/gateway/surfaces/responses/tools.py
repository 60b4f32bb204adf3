"""Tools of a response as functions, and calls of these functions back as the tools'. Pure.

A custom tool is a function of one string. The tools of a namespace carry its name, since a model has one for each.
Tools that run on OpenAI's hosts do not exist here and are left out.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from nodes.gateway.errors import invalid, required, unsupported
from nodes.gateway.fields.tool_fields import Choice
from nodes.gateway.fields.tool_types import FunctionDefinition, FunctionName
from nodes.gateway.surfaces.responses.body import (
    NamespacedTool,
    ResponseTool,
    ResponseToolChoice,
    ResponseToolReference,
)

CUSTOM_INPUT: Final = "input"
"""The one parameter of the function that stands for a custom tool."""
_SEPARATOR: Final = "__"
"""Between namespace and name: what agents put between an MCP server's name and that of its tool."""
_FUNCTION: Final = "function"
_CUSTOM: Final = "custom"
_NAMESPACE: Final = "namespace"
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


class ToolName(NamedTuple):
    """What the client calls the tool that a function stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ToolTable:
    """The tools of one call. `functions` are those that it offers; `hosted` the types of tools that are left out."""

    def __init__(self, tools: Sequence[ResponseTool] | None) -> None:
        """Raises `BadRequest`, naming the tool."""
        self.functions: dict[str, FunctionDefinition] = {}
        self.hosted: list[str] = []
        self._names: dict[str, ToolName] = {}
        for index, tool in enumerate(tools or ()):
            where = f"tools.{index}"
            if tool.type != _NAMESPACE:
                self._add(tool, where)
                continue
            namespace = required(tool.name, f"{where}.name")
            for number, inner in enumerate(tool.tools or ()):
                self._add(inner, f"{where}.tools.{number}", namespace)

    def name_of(self, function: str) -> ToolName:
        """The tool that a function stands for."""
        return self._names.get(function) or ToolName(function)

    def _add(self, tool: NamespacedTool, where: str, namespace: str | None = None) -> None:
        if tool.type not in (_FUNCTION, _CUSTOM):
            self.hosted.append(tool.type)
            return
        name = flat_name(required(tool.name, f"{where}.name"), namespace)
        try:
            msgspec.convert(name, FunctionName)
        except msgspec.ValidationError as error:
            raise invalid(f"'{where}.name' makes '{name[:200]}' a function's name: {error}.", f"{where}.name") from None
        is_custom = tool.type == _CUSTOM
        self._names[name] = ToolName(tool.name or "", namespace, is_custom)
        self.functions[where] = _custom(tool, name) if is_custom else _plain(tool, name)


def choice_of(given: Literal["none", "auto", "required"] | ResponseToolChoice | None, *, one_call: bool) -> Choice:
    """Raises `BadRequest`."""
    if not isinstance(given, ResponseToolChoice):
        return Choice(given or "auto", None, one_call)
    if given.type == "allowed_tools":
        references = {f"tool_choice.tools.{index}": one for index, one in enumerate(given.tools or ())}
        # Those of hosted tools allow what is not there.
        named = {where: name for where, one in references.items() if (name := _reference(one, where))}
        if not named and given.mode == "required":
            raise unsupported("'tool_choice' requires a call of tools that this server does not run.", "tool_choice")
        return Choice(given.mode, named, one_call) if named else Choice("none")
    if not (name := _reference(given, "tool_choice")):
        message = f"'tool_choice' names a tool of type '{given.type[:64]}', which this server does not run."
        raise unsupported(message, "tool_choice")
    return Choice("named", {"tool_choice": name}, one_call)


def _reference(tool: ResponseToolChoice | ResponseToolReference, where: str) -> str:
    """Empty for a tool of a host."""
    is_here = tool.type in (_FUNCTION, _CUSTOM)
    return flat_name(required(tool.name, f"{where}.name"), tool.namespace) if is_here else ""


def flat_name(name: str, namespace: str | None) -> str:
    """The function's name for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def _plain(tool: NamespacedTool, name: str) -> FunctionDefinition:
    return FunctionDefinition(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _custom(tool: NamespacedTool, name: str) -> FunctionDefinition:
    said = [tool.description or "", *_format(tool.format or {})]
    return FunctionDefinition(name=name, description="\n\n".join(filter(None, said)), parameters=_CUSTOM_PARAMETERS)


def _format(described: dict[str, Any]) -> Iterable[str]:
    """The format of a custom tool's text, for the model to read: it is not enforced."""
    if described.get("type") == "grammar" and isinstance(described.get("definition"), str):
        syntax = described.get("syntax", "")
        yield f"The value of `{CUSTOM_INPUT}` is text of this {syntax} grammar:\n{described['definition']}"
