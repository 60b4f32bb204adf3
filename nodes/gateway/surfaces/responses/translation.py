"""From the body of POST /v1/responses to a conversation, and what its answer is to be as `ChatOptions`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct, defstruct

from nodes.asks.grammar_fields import JsonObjectFormat, JsonSchemaFormat, NamedSchema
from nodes.gateway.errors import Names, required, unsupported
from nodes.gateway.fields.body_reader import BodyReader, Decoded
from nodes.gateway.fields.conversation import Conversation
from nodes.gateway.fields.openai_types import CHAT_OPTIONS
from nodes.gateway.fields.tool_fields import tool_use
from nodes.gateway.surfaces.responses.body import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    ResponseItem,
    ResponsesBody,
    ResponseTextFormat,
)
from nodes.gateway.surfaces.responses.history import Turns
from nodes.gateway.surfaces.responses.tools import ToolTable, choice_of

_NOT_OF_RESPONSES: Final = frozenset(
    {
        # Said otherwise here.
        "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "verbosity", "stream_options",
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
_SAME: Final = ("model", "temperature", "top_p", "user", "stream", "top_logprobs")
"""Those that both take, and whose effect is the same."""
NAMES: Final[Names] = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}
"""By field of `ChatOptions`: the field that the client knows it by."""
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
        for field in msgspec.structs.fields(CHAT_OPTIONS)
        if field.encode_name not in own | _NOT_OF_RESPONSES
    ]
    return defstruct("ResponsesBody", fields, bases=(ResponsesBody,), frozen=True, kw_only=True, module=__name__)


RESPONSES_BODY: Final = _with_chat_fields()
"""`ResponsesBody` with the fields of chats that are about sampling."""
_PASSED_ON: Final = frozenset(RESPONSES_BODY.__struct_fields__) - frozenset(ResponsesBody.__struct_fields__)
_READER: Final = BodyReader(RESPONSES_BODY)
_ITEMS: Final = msgspec.json.Decoder(list[ResponseItem])


class Asked(NamedTuple):
    """What a client asked for: its body, its fields as raw JSON, and names of fields that nobody knows."""

    body: ResponsesBody
    fields: Mapping[str, Any]
    unknown_fields: list[str]

    @property
    def keeps(self) -> bool:
        """Whether the response is to be stored, as OpenAI's API does by default."""
        return self.body.store is not False

    @property
    def seals_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.body.include or ())


class Translated(NamedTuple):
    """The conversation, `ChatOptions`, and the tools by which calls are translated back."""

    conversation: Conversation
    options: Decoded
    tools: ToolTable


def read(data: bytes) -> Asked:
    """Raises `BadRequest`."""
    decoded = _READER.decode(data)
    body: ResponsesBody = decoded.body
    for param, do in _REFUSED.items():
        if _has(body, param):
            raise unsupported(f"'{param}' is not supported by this server. {do}", param)
    return Asked(body, decoded.fields, decoded.unknown_fields)


def _has(body: ResponsesBody, param: str) -> bool:
    value: Any = body
    for name in param.split("."):
        value = getattr(value, name, None)
    return value is not None and value not in (False, "disabled", [])


def translate(asked: Asked, history: Sequence[ResponseItem] = ()) -> Translated:
    """`history` is what the response at `previous_response_id` has seen and said. Raises `BadRequest`."""
    body = asked.body
    tools, turns = ToolTable(body.tools), Turns(body.instructions)
    turns.add(history, "previous_response_id", is_stored=True)
    if isinstance(body.input, list):
        turns.add(body.input, "input")
    elif body.input:
        turns.say("user", body.input)
    choice = choice_of(body.tool_choice, one_call=body.parallel_tool_calls is False)
    conversation = Conversation(
        turns=turns.finish(),
        tools=tool_use(tools.functions, choice),
        # Codex says as the developer what has changed since the turn before: the sandbox, the model.
        late_system_as_user=True,
    )
    options = _options_of(asked)
    unknown = [*asked.unknown_fields, *(f"tools: {kind}" for kind in tools.hosted)]
    return Translated(conversation, Decoded(CHAT_OPTIONS(**options), {**options, **asked.fields}, unknown), tools)


def _options_of(asked: Asked) -> dict[str, Any]:
    body, fields = asked.body, asked.fields
    options: dict[str, Any] = {name: getattr(body, name) for name in _PASSED_ON | {*_SAME} if name in fields}
    if body.text is not None:
        options |= {"verbosity": body.text.verbosity, "response_format": _response_format(body.text.format)}
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        options["logprobs"] = True
    if body.reasoning is not None:
        options["reasoning_effort"] = body.reasoning.effort
    return options | {"max_completion_tokens": body.max_output_tokens}


def _response_format(wanted: ResponseTextFormat | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JsonObjectFormat(schema=wanted.schema)
    schema = required(wanted.schema, "text.format.schema")
    return JsonSchemaFormat(json_schema=NamedSchema(name=wanted.name, schema=schema, strict=wanted.strict))


def stored_items(data: bytes) -> list[ResponseItem]:
    """Items as they were stored."""
    return _ITEMS.decode(data)
