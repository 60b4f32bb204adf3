"""From the body of POST /v1/responses to that of POST /v1/chat/completions, which is all that is served below. Pure."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw, Struct, defstruct

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.body_reader import BodyReader
from nodes.gateway.fields.openai_types import CHAT_BODY
from nodes.gateway.surfaces.responses.body import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    ResponseItem,
    ResponsesBody,
    ResponseTextFormat,
)
from nodes.gateway.surfaces.responses.history import Conversation
from nodes.gateway.surfaces.responses.tools import ToolTable

_NOT_OF_RESPONSES: Final = frozenset(
    {
        # Said otherwise here.
        "messages", "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "verbosity",
        "stream_options", "functions", "function_call",
        # Reasoning is an item by itself.
        "include_reasoning", "separate_reasoning", "stream_reasoning",
        # An answer is one sample of one chat from its beginning.
        "n", "add_generation_prompt", "continue_final_message",
        # Answers have no place for it.
        "logprobs", "logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_prompt_token_ids",
        "return_tokens_as_token_ids",
    }
)  # fmt: skip
"""Fields of chats that responses do not take under the same name."""
_SAME: Final = ("model", "temperature", "top_p", "user", "parallel_tool_calls", "stream", "top_logprobs")
"""Those that both take, and whose effect is the same."""
_RENAMED: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""By field of the chat: the field that the client knows it by."""
_REFUSED: Final = {
    "background": "Leave it out and read the stream.",
    "conversation": "Send the conversation as 'input'.",
    "prompt": "Send its text as 'instructions' or 'input'.",
    "context_management": "Shorten the conversation before you send it.",
    "truncation": "Shorten the conversation before you send it.",
    "stream_options.include_obfuscation": "Leave it out.",
}
"""Fields of the API that would need what is not here, and what to do instead."""


def _with_chat_fields() -> type[Struct]:
    own = frozenset(ResponsesBody.__struct_fields__)
    fields: list[tuple[str, Any, Any]] = [
        (field.encode_name, field.type, None)
        for field in msgspec.structs.fields(CHAT_BODY)
        if field.encode_name not in own | _NOT_OF_RESPONSES
    ]
    return defstruct("ResponsesBody", fields, bases=(ResponsesBody,), frozen=True, kw_only=True, module=__name__)


RESPONSES_BODY: Final = _with_chat_fields()
"""`ResponsesBody` with the fields of chats that are about sampling."""
_PASSED_ON: Final = frozenset(RESPONSES_BODY.__struct_fields__) - frozenset(ResponsesBody.__struct_fields__)
_READER: Final = BodyReader(RESPONSES_BODY)
_ITEMS: Final = msgspec.json.Decoder(list[ResponseItem])


class Asked(NamedTuple):
    """What a client asked for: its body, the raw JSON of its fields, and names of fields that nobody knows."""

    body: ResponsesBody
    fields: dict[str, Raw]
    unknown_fields: list[str]

    @property
    def keeps(self) -> bool:
        """Whether the response is to be stored, as OpenAI's API does by default."""
        return self.body.store is not False

    @property
    def seals_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.body.include or ())


class Translated(NamedTuple):
    """The chat's body as JSON, the tools by which calls are translated back, and how to name the client's fields."""

    chat: bytes
    tools: ToolTable
    params: dict[str, str]

    def name_of(self, chat_param: str) -> str:
        """What the client calls a field of the chat."""
        head, rest = chat_param, ""
        while head not in self.params:
            head, dot, tail = head.rpartition(".")
            if not dot:
                return chat_param
            rest = f".{tail}{rest}"
        return self.params[head] + rest


def read(data: bytes) -> Asked:
    """Raises `BadRequest`."""
    decoded = _READER.decode(data)
    body: ResponsesBody = decoded.body
    for param, do in _REFUSED.items():
        if _has(body, param):
            message = f"'{param}' is not supported by this server. {do}"
            raise BadRequest(message, param=param, code="unsupported_parameter")
    return Asked(body, decoded.fields, decoded.unknown_fields)


def _has(body: ResponsesBody, param: str) -> bool:
    value: Any = body
    for name in param.split("."):
        value = getattr(value, name, None)
    return value is not None and value not in (False, "disabled", [])


def translate(asked: Asked, history: Sequence[ResponseItem] = ()) -> Translated:
    """`history` is what the response at `previous_response_id` has seen and said. Raises `BadRequest`."""
    body, fields = asked.body, asked.fields
    tools = ToolTable(body.tools)
    conversation = Conversation(body.instructions)
    conversation.add(history, "previous_response_id", is_stored=True)
    if isinstance(body.input, str):
        if body.input:
            conversation.say(body.input, "input")
    else:
        conversation.add(body.input, "input")
    chat: dict[str, Any] = {name: fields[name] for name in _PASSED_ON | {*_SAME} if name in fields}
    chat["messages"] = conversation.finish()
    chat |= _tools_of(body, tools) | _text_of(body)
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat["logprobs"] = True
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    return Translated(msgspec.json.encode(chat), tools, _RENAMED | tools.params | conversation.params)


def _tools_of(body: ResponsesBody, tools: ToolTable) -> dict[str, Any]:
    # A choice is made before tools are, or what it names would be missing only where there are others.
    choice = None if body.tool_choice is None else tools.choice(body.tool_choice)
    if not tools.functions:
        # A chat refuses it without tools; agents that only have hosted ones say it all the same.
        return {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    return {"tools": tools.functions} | ({} if choice is None else {"tool_choice": choice})


def _text_of(body: ResponsesBody) -> dict[str, Any]:
    text = body.text
    if text is None:
        return {}
    asked: dict[str, Any] = {} if text.verbosity is None else {"verbosity": text.verbosity}
    if text.format is not None and text.format.type != "text":
        asked["response_format"] = _response_format(text.format)
    return asked


def _response_format(wanted: ResponseTextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type, **({} if wanted.schema is None else {"schema": wanted.schema})}
    if wanted.schema is None:
        where = "text.format.schema"
        message = f"Missing required parameter: '{where}'."
        raise BadRequest(message, param=where, code="missing_required_parameter")
    described = {"name": wanted.name, "description": wanted.description, "strict": wanted.strict}
    given = {key: value for key, value in described.items() if value is not None}
    return {"type": wanted.type, "json_schema": {"name": "response", **given, "schema": wanted.schema}}


def stored_items(data: bytes) -> list[ResponseItem]:
    """Items as they were stored."""
    return _ITEMS.decode(data)
