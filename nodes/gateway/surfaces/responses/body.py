"""The body of POST /v1/responses as types. What is declared has an effect or is echoed; see `translation.py`."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from nodes.gateway.fields.openai_types import ContentPart
from nodes.gateway.fields.tool_types import ReasoningEffort

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""All that OpenAI's API has. Those of hosted tools and images ask for what is never there."""
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"


class ResponseItem(Struct, frozen=True, kw_only=True):
    """One item of a conversation. Which fields it needs depends on its type; without one it is a message."""

    type: str = "message"
    id: str | None = None
    role: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


ResponseToolName = Annotated[str, Meta(min_length=1, max_length=128)]


class NamespacedTool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs (`function`, `custom`), or one that OpenAI's hosts run."""

    type: str
    name: ResponseToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


class ResponseTool(NamespacedTool, frozen=True, kw_only=True):
    """A tool, or a `namespace` of tools."""

    tools: list[NamespacedTool] | None = None


class ResponseToolReference(Struct, frozen=True, kw_only=True):
    """A tool by name."""

    type: str
    name: ResponseToolName | None = None
    namespace: str | None = None


class ResponseToolChoice(Struct, frozen=True, kw_only=True):
    """One tool, or with type `allowed_tools` some of them."""

    type: str
    name: ResponseToolName | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponseToolReference] | None = None


class ResponseReasoning(Struct, frozen=True, kw_only=True):
    """No summaries are written, whatever is asked for."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseTextFormat(Struct, frozen=True, kw_only=True):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseTextConfig(Struct, frozen=True, kw_only=True):
    """What the answer's text has to be."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Struct, frozen=True, kw_only=True):
    """Streams carry no obfuscation."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ResponsesBody(Struct, frozen=True, kw_only=True):
    """POST /v1/responses. Fields of chat completions that are about sampling alone may be there as well."""

    input: str | list[ResponseItem] = ""
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    reasoning: ResponseReasoning | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    text: ResponseTextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    tools: list[ResponseTool] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Include] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
