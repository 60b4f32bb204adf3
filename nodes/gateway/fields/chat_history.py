"""What the types of a chat's messages cannot say; the messages go to the tokenizer as they were sent. Pure."""

from collections.abc import Sequence

from nodes.gateway.errors import invalid, required
from nodes.gateway.fields.conversation import check_parts
from nodes.gateway.fields.openai_types import ChatMessage


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises BadRequest naming the place."""
    called: set[str] = set()
    functions: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message.content is not None:
            check_parts(message.content, f"{where}.content")
        elif not _says_otherwise(message):
            place = f"{where}.content"
            problem = f"'{place}' is required unless the message has a refusal, reasoning, tool_calls or function_call."
            raise invalid(problem, place)
        called.update(call.id for call in message.tool_calls or () if call.id is not None)
        if message.function_call is not None:
            functions.add(message.function_call.name)
        if message.role == "tool":
            _check_answers(message.tool_call_id, called, f"{where}.tool_call_id", "call of an assistant")
        elif message.role == "function":
            _check_answers(message.name, functions, f"{where}.name", "function that an assistant called")


def _check_answers(given: str | None, known: set[str], where: str, what: str) -> None:
    if (name := required(given, where)) not in known:
        raise invalid(f"'{where}' is '{name[:100]}', which is no {what} in an earlier message.", where)


def _says_otherwise(message: ChatMessage) -> bool:
    """Whether there is something in place of a content: also reasoning alone, if an agent was stopped amid it."""
    if (message.refusal, message.tool_calls, message.function_call) != (None,) * 3:
        return True
    return any(isinstance(one, str) for one in (message.reasoning, message.reasoning_content, message.thinking))
