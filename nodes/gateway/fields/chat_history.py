"""What the types of a chat's messages cannot say; the messages go to the tokenizer as they were sent. Pure."""

from collections.abc import Sequence

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.openai_types import REFUSAL_PART, TEXT_PARTS, ChatMessage, ContentPart


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises BadRequest naming the place."""
    called: set[str] = set()
    functions: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_content(message, f"{where}.content")
        called.update(call.id for call in message.tool_calls or () if call.id is not None)
        if message.function_call is not None:
            functions.add(message.function_call.name)
        if message.role == "tool":
            _check_answers(message.tool_call_id, called, f"{where}.tool_call_id", "call of an assistant")
        elif message.role == "function":
            _check_answers(message.name, functions, f"{where}.name", "function that an assistant called")


def _check_answers(given: str | None, known: set[str], where: str, what: str) -> None:
    if given is None:
        message = f"Missing required parameter: '{where}'."
        raise BadRequest(message, param=where, code="missing_required_parameter")
    if given not in known:
        message = f"'{where}' is '{given[:100]}', which is no {what} in an earlier message."
        raise BadRequest(message, param=where, code="invalid_value")


def _check_content(message: ChatMessage, where: str) -> None:
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            _check_part(part, f"{where}.{number}")
    elif message.content is None and not _says_otherwise(message):
        problem = f"'{where}' is required unless the message has a refusal, reasoning, tool_calls or function_call."
        raise BadRequest(problem, param=where, code="invalid_value")


def _says_otherwise(message: ChatMessage) -> bool:
    """Whether there is something in place of a content: also reasoning alone, if an agent was stopped amid it."""
    if (message.refusal, message.tool_calls, message.function_call) != (None,) * 3:
        return True
    return any(isinstance(one, str) for one in (message.reasoning, message.reasoning_content, message.thinking))


def _check_part(part: ContentPart, where: str) -> None:
    if part.type not in TEXT_PARTS and part.type != REFUSAL_PART:
        message = f"Content of type '{part.type[:64]}' is not supported by this model."
        raise BadRequest(message, param=f"{where}.type", code="unsupported_parameter")
    field = "refusal" if part.type == REFUSAL_PART else "text"
    if getattr(part, field) is None:
        message = f"Missing required parameter: '{where}.{field}'."
        raise BadRequest(message, param=f"{where}.{field}", code="missing_required_parameter")
