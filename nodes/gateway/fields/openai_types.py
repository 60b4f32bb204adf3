"""Bodies of the HTTP surface as types: what is decoded, what is answered, and what `/openapi.json` says.

Only fields that have an effect are declared; `unsupported.py` lists the known ones that are refused. Those of asks
(`nodes/asks/`) are in `CHAT_BODY` and `COMPLETION_BODY`, which are what is decoded. Limits that do not
depend on the model are part of the types, so that a decoding error names the parameter.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, defstruct

from nodes.asks import fields_of
from nodes.gateway.fields.cache_scope import CacheSalt
from nodes.gateway.fields.tool_types import (
    FunctionChoice,
    Functions,
    ReasoningEffort,
    SaidCall,
    SaidFunction,
    ToolChoice,
    Tools,
)
from nodes.gateway.fields.truncation import TruncationFields
from nodes.gateway.request_names import MAX_CHARS as MAX_CLIENT_ID_CHARS
from nodes.request import TokenId

MAX_STOPS = 16
"""OpenAI takes 4, vLLM any number. Each costs the detokenizer half a microsecond a token (docs/benchmarks.md)."""
MAX_STOP_CHARS = 256
"""A detokenizer holds back as much text of each stream as may be the beginning of a stop string."""
MAX_STOP_TOKEN_IDS = 64
"""Each goes with every attempt and is masked in logits below `min_tokens`; models name a handful."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of message parts that are text; the text of a `REFUSAL_PART` is in its `refusal` field."""
REFUSAL_PART = "refusal"

TokenCount = Annotated[int, Meta(ge=0, lt=2**31)]
"""0 only where the prompt is shown: `jobs/validation.py` checks that."""
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)] | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
"""One string or several; an empty string or list means none."""
Prompt = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""Text, texts, token ids, or lists of token ids; `jobs/validation.py` checks that they are of one kind, and some."""


class StreamOptions(Struct, frozen=True, kw_only=True):
    """What a stream carries in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(TruncationFields, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    request_id: Annotated[str, Meta(max_length=MAX_CLIENT_ID_CHARS)] | None = None
    rid: Annotated[str, Meta(max_length=MAX_CLIENT_ID_CHARS)] | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None


class ContentPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a message; only text is supported (`conversation.py`)."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message. Other fields reach the chat template as they are. `content` may be null with a refusal, a call, or
    reasoning, which has three names: an answer that was broken off in it is nothing else.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    thinking: Any = None
    tool_calls: list[SaidCall] | None = None
    function_call: SaidFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatOptions(GenerationBody, frozen=True, kw_only=True):
    """What the body of a chat has beside its messages and tools."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Raw] | None = None
    documents: list[dict[str, Any]] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None


class ChatCompletionBody(ChatOptions, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    add_special_tokens: bool | None = None


def _with_asks(body: type[Struct], route: Literal["chat", "text"]) -> type[Struct]:
    fields: list[tuple[str, Any, Any]] = [(name, kind | None, None) for name, kind in fields_of(route).items()]
    return defstruct(body.__name__, fields, bases=(body,), frozen=True, kw_only=True, module=__name__)


CHAT_BODY: Final = _with_asks(ChatCompletionBody, "chat")
"""`ChatCompletionBody` with the fields of what a request may ask of its draws."""
CHAT_OPTIONS: Final = _with_asks(ChatOptions, "chat")
"""The same of `ChatOptions`, which other surfaces make of their bodies."""
COMPLETION_BODY: Final = _with_asks(CompletionBody, "text")
"""The same of `CompletionBody`."""


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Raw] | None = None
    tools: Tools | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """How many of the prompt's tokens were in the cache and did not have to be computed."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """How many tokens were reasoning, as far as its share of the text's characters tells."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts, taken from the gateway's record of the call: of all tokens drawn, those of a stop string, too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CachedTokensDetails(Struct, frozen=True, kw_only=True):
    """Where cached tokens were, in SGLang's words: its tiers are the device, host memory behind it, and storage.

    Pools are the first, wherever their pages lie; there is no tier behind them but the disk.
    """

    device: int
    host: int = 0
    storage: int | UnsetType = UNSET
    storage_backend: str | UnsetType = UNSET


class SglExt(Struct, frozen=True, kw_only=True):
    """What SGLang's answers have beside OpenAI's."""

    cached_tokens_details: CachedTokensDetails


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The model's answer; `content` is null if it is calls alone. `reasoning` is there twice, under vLLM's names for it
    of today and of before, which others have. `function_call` answers the deprecated `functions`.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: "list[ToolCall] | UnsetType" = UNSET
    function_call: "CalledFunction | UnsetType" = UNSET


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token that could have been drawn. `bytes` are exact where `token` has U+FFFD for part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class DrawnTokenLogprob(Struct, frozen=True, kw_only=True):
    """The token that was drawn, and the most likely ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Of each token of a message, without the one that ends it."""

    content: list[DrawnTokenLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """Of each token, also of the one that ends the text; in `top_logprobs` the drawn one is beside the most likely.
    With an echo, of the prompt's tokens first; nothing is said of the very first one.

    `text_offset`: the character of `text` that the token begins in.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """How likely a token was in one place of the prompt; `rank` from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position of the prompt, and by token id: the prompt's own token first, then the most likely ones. Null for the
first, which nothing precedes."""


class StopFound(Struct, frozen=True, kw_only=True):
    """Which stop ended a text: the string, or the token's id. `stop_reason`, vLLM's field, is null for the model's own
    end, `matched_stop` is SGLang's.
    """

    stop_reason: str | int | None
    matched_stop: str | int | None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One sample of a chat completion."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    sglext: SglExt | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One sample of one prompt."""

    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    sglext: SglExt | UnsetType = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """One served model. `quantization` is what its weights are rounded to, if they are."""

    id: str
    object: Literal["model"] = "model"
    created: int
    max_model_len: int
    root: str
    quantization: str | None = None
    owned_by: str = "kvmesh"


class ModelList(Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models; `models` is for the Codex CLI."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[dict[str, Any]] = []


class Tokenized(Struct, frozen=True, kw_only=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(Struct, frozen=True, kw_only=True):
    """Answer of POST /detokenize."""

    prompt: str


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What is wrong; `param` is the field's dotted path, `request_id` the server's id, as in `X-Kvmesh-Request-Id`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str = ""


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Answers of status 400 and above, except those of health routes; also the last event of a stream that failed."""

    error: ErrorDetail


class Version(Struct, frozen=True, kw_only=True):
    """Answer of GET /version."""

    version: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Answer of GET /tokenizer_info, as vLLM's: what `tokenizer_config.json` says, with the special tokens, the chat
    template and the context length that are in force.
    """

    tokenizer_class: str
    model_max_length: int
    chat_template: str | UnsetType = UNSET


class ServerLoad(Struct, frozen=True, kw_only=True):
    """Answer of GET /load, as vLLM's: how many calls this gateway is working on."""

    server_load: int


class Readiness(Struct, frozen=True, kw_only=True):
    """Answer of the health routes; `reasons` lists what is missing."""

    status: Literal["ok", "not_ready"] = "ok"
    reasons: list[str] = []
