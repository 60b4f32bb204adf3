"""The answer of POST /v1/responses as types, and the items that it consists of."""

from typing import Any, Final, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from nodes.gateway.fields.openai_types import CompletionTokensDetails, DrawnTokenLogprob

RESPONSE_ID_PREFIX: Final = "resp_"

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """A part of a message; with `logprobs` of its tokens if they were asked for."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[DrawnTokenLogprob] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str = ""


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before. `encrypted_content` is the same text for clients that keep no other."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; if `incomplete`, its arguments were cut or are no JSON object."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomToolCall(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


Item = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """How many of the input's tokens were in the cache. Writing to it costs nobody anything and is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts, from the gateway's record of the call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct, frozen=True, kw_only=True):
    """Why a response failed after it had begun: `code` is one of OpenAI's, `type` that of this server's errors."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str
    param: str | None = None


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """Answer of DELETE /v1/responses/ID."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class Response(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/responses; in events, as far as it is known. Most fields say what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: Raw | UnsetType = UNSET
    reasoning: Raw
    safety_identifier: Raw | UnsetType = UNSET
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
