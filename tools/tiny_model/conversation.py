"""What a conversation of the grammar is made of: tools, calls, messages and the right answer.

Read by the grammar, the tokenizer's script, training, evaluation and the tests. Pure Python.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer; ``parameters`` are names with their JSON types."""

    name: str
    parameters: tuple[tuple[str, str], ...]

    def signature(self) -> str:
        """How the prompt shows it: ``weather(city: string)``."""
        return f"{self.name}({', '.join(f'{name}: {kind}' for name, kind in self.parameters)})"

    def openai(self) -> dict[str, Any]:
        """The form in which clients send it."""
        schema = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.parameters},
            "required": [name for name, _ in self.parameters],
        }
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool; ``arguments`` is a JSON object as ``json.dumps`` writes it."""

    name: str
    arguments: str

    def text(self) -> str:
        """What the assistant says to make the call."""
        return f'{CALL_START}\n{{"name": "{self.name}", "arguments": {self.arguments}}}\n{CALL_END}'

    def openai(self) -> dict[str, Any]:
        """The form in which clients send it back, its arguments as an object."""
        return {"type": "function", "function": {"name": self.name, "arguments": json.loads(self.arguments)}}


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; ``role`` is ``system``, ``user``, ``assistant`` or ``tool``. One with calls has no content."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()

    def text(self) -> str:
        """What stands in its turn."""
        return answer_of(self.calls) if self.calls else self.content

    def openai(self) -> dict[str, Any]:
        """The form in which clients send it."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        return fields | {"tool_calls": [call.openai() for call in self.calls]} if self.calls else fields


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends in a user message or a tool's result, and the one right answer to it.

    ``held_out`` says that the last question is in the held-out tenth; earlier ones never are.
    """

    messages: tuple[Message, ...]
    answer: str
    family: str
    held_out: bool
    tools: tuple[Tool, ...] = ()


def answer_of(calls: tuple[Call, ...]) -> str:
    """What the assistant says to make calls, one below the other."""
    return "\n".join(call.text() for call in calls)
