"""Tools of a response as functions of a chat, and calls of these functions back as the tools'. Pure.

A custom tool is a function of one string. The tools of a namespace carry its name, since a chat has one name for each.
Tools that run on OpenAI's hosts do not exist here and are left out.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from nodes.gateway.errors import BadRequest
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
    """The tools of one call. `functions` are those of the chat; `hosted` the types of tools that were left out."""

    def __init__(self, tools: Sequence[ResponseTool] | None) -> None:
        """Raises `BadRequest`, naming the tool."""
        self.functions: list[dict[str, Any]] = []
        self.hosted: list[str] = []
        self.params: dict[str, str] = {}
        self._names: dict[str, ToolName] = {}
        for index, tool in enumerate(tools or ()):
            where = f"tools.{index}"
            if tool.type != _NAMESPACE:
                self._add(tool, where)
                continue
            namespace = _required(tool.name, f"{where}.name")
            for number, inner in enumerate(tool.tools or ()):
                self._add(inner, f"{where}.tools.{number}", namespace)

    def name_of(self, function: str) -> ToolName:
        """The tool that a function of the chat stands for."""
        return self._names.get(function) or ToolName(function)

    def is_custom(self, function: str) -> bool:
        return self.name_of(function).is_custom

    def choice(self, choice: str | ResponseToolChoice) -> str | dict[str, Any]:
        """`tool_choice` of the chat. Raises `BadRequest`."""
        if isinstance(choice, str):
            return choice
        if choice.type == "allowed_tools":
            references = choice.tools or []
            named = [self._reference(one, f"tool_choice.tools.{i}") for i, one in enumerate(references)]
            # Those of hosted tools allow what is not there.
            functions = [{"type": _FUNCTION, _FUNCTION: {"name": name}} for name in named if name]
            if not functions and choice.mode == "auto":
                return "none"
            if not functions:
                message = "'tool_choice' requires a call of tools that this server does not run."
                raise BadRequest(message, param="tool_choice", code="unsupported_parameter")
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": functions}}
        name = self._reference(choice, "tool_choice")
        if not name:
            message = f"'tool_choice' names a tool of type '{choice.type[:64]}', which this server does not run."
            raise BadRequest(message, param="tool_choice", code="unsupported_parameter")
        return {"type": _FUNCTION, _FUNCTION: {"name": name}}

    def _reference(self, tool: ResponseToolChoice | ResponseToolReference, where: str) -> str:
        if tool.type not in (_FUNCTION, _CUSTOM):
            return ""
        name = flat_name(_required(tool.name, f"{where}.name"), tool.namespace)
        if name not in self._names:
            raise BadRequest(
                f"'{where}' names '{name[:64]}', which is not among 'tools'.", param=where, code="invalid_value"
            )
        return name

    def _add(self, tool: NamespacedTool, where: str, namespace: str | None = None) -> None:
        if tool.type in (_FUNCTION, _CUSTOM):
            self._add_function(tool, where, namespace)
        else:
            self.hosted.append(tool.type)

    def _add_function(self, tool: NamespacedTool, where: str, namespace: str | None) -> None:
        name = flat_name(_required(tool.name, f"{where}.name"), namespace)
        if name in self._names:
            # One name for two tools: nobody could tell which of them is called.
            message = f"'{where}.name' is '{name[:64]}', as is that of a tool before it."
            raise BadRequest(message, param=f"{where}.name", code="invalid_value")
        is_custom = tool.type == _CUSTOM
        self._names[name] = ToolName(tool.name or "", namespace, is_custom)
        here = f"tools.{len(self.functions)}"
        self.params |= {f"{here}.{_FUNCTION}": where, here: where}
        self.functions.append({"type": _FUNCTION, _FUNCTION: _custom(tool, name) if is_custom else _plain(tool, name)})


def flat_name(name: str, namespace: str | None) -> str:
    """The function's name for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def _required(name: str | None, where: str) -> str:
    if not name:
        message = f"Missing required parameter: '{where}'."
        raise BadRequest(message, param=where, code="missing_required_parameter")
    return name


def _plain(tool: NamespacedTool, name: str) -> dict[str, Any]:
    fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"name": name} | {key: value for key, value in fields.items() if value is not None}


def _custom(tool: NamespacedTool, name: str) -> dict[str, Any]:
    said = [tool.description or "", *_format(tool.format or {})]
    return {"name": name, "description": "\n\n".join(filter(None, said)), "parameters": _CUSTOM_PARAMETERS}


def _format(described: dict[str, Any]) -> Iterable[str]:
    """The format of a custom tool's text, for the model to read: it is not enforced."""
    if described.get("type") == "grammar" and isinstance(described.get("definition"), str):
        syntax = described.get("syntax", "")
        yield f"The value of `{CUSTOM_INPUT}` is text of this {syntax} grammar:\n{described['definition']}"
