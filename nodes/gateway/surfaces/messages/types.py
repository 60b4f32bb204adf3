"""Bodies and answers of Anthropic's Messages API as types, for `/v1/messages` and `/v1/messages/count_tokens`.

Names, and what may be left out, follow the types of the `anthropic` package. Only fields that have an effect are
declared; `ACCEPTED` names those that have none, `REFUSED` those that would have one. Fields of blocks that are not
declared, such as `cache_control`, are passed over: prefixes are cached without being asked for.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

from nodes.gateway.fields.cache_scope import CacheSalt
from nodes.gateway.fields.openai_types import MAX_STOPS, StopString, TokenCount
from nodes.gateway.fields.tool_types import MAX_TOOLS, FunctionName

ACCEPTED: Final = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields without an effect on the answer's text."""

REFUSED: Final[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}
"""By field: the values that change nothing; others are refused."""


class TextBlock(Struct, tag="text", frozen=True, kw_only=True):
    """Text of any role."""

    text: str


class TextPart(Struct, frozen=True, kw_only=True):
    """Text where nothing else may stand."""

    # Not a tag: one that is missing would be taken for granted where there is no other kind.
    type: Literal["text"]
    text: str


class TextSource(Struct, tag="text", frozen=True, kw_only=True):
    """A document as plain text."""

    data: str


class ContentSource(Struct, tag="content", frozen=True, kw_only=True):
    """A document as text or blocks of it."""

    content: str | list[TextPart]


class DocumentBlock(Struct, tag="document", frozen=True, kw_only=True):
    """A document whose text is in the body; others (PDF, addresses, files) are refused."""

    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Struct, tag="search_result", frozen=True, kw_only=True):
    """What a client's search has found."""

    title: str
    source: str
    content: list[TextPart]


class ToolReferenceBlock(Struct, tag="tool_reference", frozen=True, kw_only=True):
    """A tool that a client's search among its tools has found."""

    tool_name: str


class ThinkingBlock(Struct, tag="thinking", frozen=True, kw_only=True):
    """The model's reasoning. A signature is not checked: conversations may have begun elsewhere."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, tag="redacted_thinking", frozen=True, kw_only=True):
    """Reasoning that nobody but its author can read: it is left out."""

    data: str = ""


class ToolUseBlock(Struct, tag="tool_use", frozen=True, kw_only=True):
    """A call of a tool, by the model."""

    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Raw]


ResultPart: TypeAlias = TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Struct, tag="tool_result", frozen=True, kw_only=True):
    """What a call gave, by the user."""

    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


Block: TypeAlias = (
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class MessageParam(Struct, frozen=True, kw_only=True):
    """One turn. Of the role `system` are instructions that stand in the middle of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct, frozen=True, kw_only=True):
    """A tool of the client, with a schema. One of another `type` is the server's or has a schema known to models: such
    are not offered to the model. One with `defer_loading` is shown to it where a result refers to it.
    """

    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    defer_loading: bool | None = None


class ToolChoiceAuto(Struct, tag="auto", frozen=True, kw_only=True):
    """A call or none."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(Struct, tag="any", frozen=True, kw_only=True):
    """A call of some tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(Struct, tag="tool", frozen=True, kw_only=True):
    """A call of this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(Struct, tag="none", frozen=True, kw_only=True):
    """No call."""


ToolChoice: TypeAlias = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone

Display = Literal["summarized", "omitted", "highlights", "updates"]
"""`omitted`: reasoning is generated and not shown. The others show all of it."""


class ThinkingEnabled(Struct, tag="enabled", frozen=True, kw_only=True):
    """Reasoning, where the template can ask for it. A budget is a target that no model is held to."""

    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    display: Display | None = None


class ThinkingDisabled(Struct, tag="disabled", frozen=True, kw_only=True):
    """No reasoning, where the template can turn it off."""


class ThinkingAdaptive(Struct, tag="adaptive", frozen=True, kw_only=True):
    """As the model does by default."""

    display: Display | None = None


class ThinkingBetweenTools(Struct, tag="between_tools", frozen=True, kw_only=True):
    """As the model does by default."""


Thinking: TypeAlias = ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive | ThinkingBetweenTools


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """The answer is JSON that fits this schema."""

    # Not a tag: one that is missing would be taken for granted where there is no other kind.
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True):
    """How much effort the model makes, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaFormat | None = None


class CountTokensBody(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextPart] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaFormat | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """POST /v1/messages. `max_tokens` 0 fills the cache and gives no text."""

    max_tokens: TokenCount
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Tokens. `input_tokens` are those of the prompt that were not read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextAnswer(Struct, tag="text", frozen=True, kw_only=True):
    """Text of the model."""

    text: str


class ThinkingAnswer(Struct, tag="thinking", frozen=True, kw_only=True):
    """Reasoning of the model, signed with a digest of itself."""

    thinking: str
    signature: str


class ToolUseAnswer(Struct, tag="tool_use", frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    name: str
    input: Raw


AnswerBlock: TypeAlias = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageAnswer(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/messages without `stream`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetail(Struct, frozen=True, kw_only=True):
    """What is wrong."""

    type: str
    message: str


class MessagesErrorBody(Struct, frozen=True, kw_only=True):
    """Answers of status 400 and above of both routes; also the last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str
