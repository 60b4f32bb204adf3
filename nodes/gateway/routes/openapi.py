"""`/openapi.json`, generated from the types that decode and encode.

It allows all that is served, and names the fields that are refused; rules between fields, and limits of the model, are
left to errors, which say them by the field's name. (A document that allowed exactly what the validation accepts took
330 lines beside it, and nobody but its own tests read them.)
"""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from nodes.gateway.config import GatewayConfig
from nodes.gateway.control.info import Loads, ModelInfo, ServerInfo, TokensOfRank, WeightVersion
from nodes.gateway.control.pages import AbortBody, Done, MemoryAnswer, MemoryBody
from nodes.gateway.fields.openai_types import (
    CHAT_BODY,
    COMPLETION_BODY,
    ChatCompletion,
    Completion,
    DetokenizeBody,
    DetokenizedText,
    ErrorBody,
    ModelCard,
    ModelList,
    Readiness,
    ServerLoad,
    TokenizeBody,
    Tokenized,
    TokenizerInfo,
    Version,
)
from nodes.gateway.fields.unsupported import NEUTRAL_VALUES, NeutralValues
from nodes.gateway.surfaces.generate.answer import GenerateAnswer
from nodes.gateway.surfaces.generate.body import GenerateBody
from nodes.gateway.surfaces.messages.types import (
    REFUSED,
    CountTokensBody,
    MessageAnswer,
    MessagesBody,
    MessagesErrorBody,
    TokensCount,
)
from nodes.gateway.surfaces.responses.answer import Response, ResponseDeleted
from nodes.gateway.surfaces.responses.translation import RESPONSES_BODY
from nodes.gateway.surfaces.vectors.answers import (
    ClassifiedList,
    EmbeddingList,
    PooledRow,
    Rank,
    RerankedList,
    RouterRank,
    ScoreList,
)
from nodes.gateway.surfaces.vectors.bodies import (
    NEUTRAL,
    AnyRerankBody,
    ClassifyBody,
    EmbedBody,
    EmbeddingsBody,
    EncodeBody,
    RerankBody,
    ScoreBody,
)
from nodes.gateway.surfaces.vectors.routes import is_served


class Operation(NamedTuple):
    """One route: what it takes and gives. `answer` is a type, several types for different bodies, or a media type if
    the answer is not JSON; `error` is what it answers in `errors`. `example` is a body that every mesh can answer.
    """

    path: str
    method: str
    summary: str
    answer: Any
    body: type[msgspec.Struct] | None = None
    errors: Sequence[int] = ()
    streams: bool = False
    example: dict[str, Any] | None = None
    error: type[msgspec.Struct] = ErrorBody

    @property
    def answers(self) -> list[Any]:
        """The types of its answers; none if they are not JSON."""
        answer: Any = self.answer
        if isinstance(answer, str):
            return []
        return [*answer] if type(answer) is tuple else [answer]


_GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_TOKENIZER_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503)
_MESSAGES_ERRORS = (400, 404, 408, 413, 415, 429, 500, 504, 529)
_MEMORY_ERRORS = (400, 403, 408, 409, 413, 415, 429, 503, 504)


def _both(
    path: str,
    summary: str,
    answer: type[msgspec.Struct] | str,
    errors: Sequence[int],
    body: type[msgspec.Struct] | None = None,
    example: dict[str, Any] | None = None,
) -> tuple[Operation, Operation]:
    """A route of SGLang's that takes either method; of a GET a body is not described."""
    get = Operation(path, "get", summary, answer, errors=errors)
    return get, get._replace(method="post", body=body, example=example)


_RANKED: dict[str, Any] = {"query": "What is red?", "documents": ["An apple.", "The sea."]}
_RANKS: Any = (RerankedList, list[RouterRank])
_CLASSES: Any = (ClassifiedList, PooledRow, list[PooledRow])
_OF_VECTORS: tuple[tuple[str, str, Any, type[msgspec.Struct], dict[str, Any]], ...] = (
    ("/v1/embeddings", "Embed texts", EmbeddingList, EmbeddingsBody, {"input": ["Hello"]}),
    ("/embeddings", "The same as /v1/embeddings", EmbeddingList, EmbeddingsBody, {"input": ["Hello"]}),
    ("/embed", "Embed texts, as text-embeddings-inference does", list[list[float]], EmbedBody, {"inputs": "Hello"}),
    ("/encode", "Embed texts, as SGLang does", (PooledRow, list[PooledRow]), EncodeBody, {"text": "Hello"}),
    ("/score", "Scores of pairs of texts", ScoreList, ScoreBody, {"text_1": "Red", "text_2": ["Apple", "Sea"]}),
    ("/v1/score", "The same as /score", ScoreList, ScoreBody, {"text_1": "Red", "text_2": ["Apple", "Sea"]}),
    (
        "/rerank",
        "Documents by relevance, in Jina's and Cohere's form or in that of text-embeddings-inference",
        (RerankedList, list[Rank]),
        AnyRerankBody,
        _RANKED,
    ),
    ("/v1/rerank", "Documents by relevance, in Jina's form", _RANKS, RerankBody, _RANKED),
    ("/v2/rerank", "Documents by relevance, in Cohere's form", _RANKS, RerankBody, _RANKED),
    ("/classify", "Classes of inputs, in vLLM's form or in SGLang's", _CLASSES, ClassifyBody, {"input": ["Hello"]}),
    ("/v1/classify", "The same as /classify", _CLASSES, ClassifyBody, {"input": ["Hello"]}),
)

_OF_TEXT = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/generate",
    }
)
"""What a model that makes vectors alone does not serve."""

OPERATIONS = (
    Operation("/v1/models", "get", "The served models", ModelList),
    Operation("/v1/models/{model_id}", "get", "One model", ModelCard, errors=(404,)),
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a chat",
        ChatCompletion,
        CHAT_BODY,
        _GENERATION_ERRORS,
        streams=True,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": True},
    ),
    Operation(
        "/v1/completions",
        "post",
        "Continue text",
        Completion,
        COMPLETION_BODY,
        _GENERATION_ERRORS,
        streams=True,
        example={"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Operation(
        "/v1/responses",
        "post",
        "Answer a conversation of items",
        Response,
        RESPONSES_BODY,
        _GENERATION_ERRORS,
        streams=True,
        example={"input": "Hello", "max_output_tokens": 32, "stream": True},
    ),
    Operation("/v1/responses/{response_id}", "get", "A response that was kept", Response, errors=(400, 404, 503)),
    Operation("/v1/responses/{response_id}/cancel", "post", "Says why it cannot be", Response, errors=(400, 404, 503)),
    Operation("/v1/responses/{response_id}", "delete", "Forget a response", ResponseDeleted, errors=(404, 503)),
    Operation(
        "/v1/messages",
        "post",
        "Answer a conversation, in the form of Anthropic's API",
        MessageAnswer,
        MessagesBody,
        _MESSAGES_ERRORS,
        streams=True,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": True},
        error=MessagesErrorBody,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "How many tokens a conversation has",
        TokensCount,
        CountTokensBody,
        _MESSAGES_ERRORS,
        example={"messages": [{"role": "user", "content": "Hello"}]},
        error=MessagesErrorBody,
    ),
    Operation(
        "/generate",
        "post",
        "Continue text or token ids, in the form of SGLang's own route",
        GenerateAnswer,
        GenerateBody,
        _GENERATION_ERRORS,
        streams=True,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 32}},
    ),
    *(
        Operation(path, "post", summary, answer, body, _GENERATION_ERRORS, example=example)
        for path, summary, answer, body, example in _OF_VECTORS
    ),
    Operation(
        "/abort_request",
        "post",
        "End requests with what they have for an answer, by the names that their clients gave them",
        Done,
        AbortBody,
        (400, 403, 408, 413, 415, 429, 503),
        example={"rid": "mine"},
    ),
    *_both("/flush_cache", "Forget all cached prefixes, if no request is under way", "text/plain", (400, 403, 503)),
    *_both(
        "/release_memory_occupation",
        "Have all worker groups release their memory",
        MemoryAnswer,
        _MEMORY_ERRORS,
        MemoryBody,
        {"tags": ["kv_cache", "weights"]},
    ),
    *_both(
        "/resume_memory_occupation",
        "Have all worker groups take their memory again",
        MemoryAnswer,
        _MEMORY_ERRORS,
        MemoryBody,
        {"tags": ["kv_cache", "weights"]},
    ),
    Operation("/model_info", "get", "The served model, as SGLang says it", ModelInfo),
    Operation("/get_model_info", "get", "The same as /model_info", ModelInfo),
    Operation("/server_info", "get", "What this server is like, as SGLang says it", ServerInfo),
    Operation("/get_server_info", "get", "The same as /server_info", ServerInfo),
    Operation("/weight_version", "get", "The version of the weights", WeightVersion),
    Operation("/get_weight_version", "get", "The same as /weight_version", WeightVersion),
    Operation("/v1/loads", "get", "How many requests the mesh has", Loads, errors=(503,)),
    Operation("/get_load", "get", "Requests and tokens of the mesh, for routers in front", list[TokensOfRank]),
    Operation(
        "/tokenize",
        "post",
        "Token ids of a prompt or chat",
        Tokenized,
        TokenizeBody,
        _TOKENIZER_ERRORS,
        example={"prompt": "Hello"},
    ),
    Operation(
        "/detokenize",
        "post",
        "Text of token ids",
        DetokenizedText,
        DetokenizeBody,
        _TOKENIZER_ERRORS,
        example={"tokens": [1, 2, 3]},
    ),
    Operation("/health/live", "get", "Whether the gateway's event loop is running", Readiness),
    Operation("/health/ready", "get", "Whether a request can be served", Readiness, errors=(503,), error=Readiness),
    Operation(
        "/health/generate", "get", "Whether a token is generated in time", Readiness, errors=(503,), error=Readiness
    ),
    Operation("/health", "get", "The same as /health/ready", Readiness, errors=(503,), error=Readiness),
    Operation("/ping", "get", "The same as /health/ready", Readiness, errors=(503,), error=Readiness),
    Operation("/healthz", "get", "The same as /health/live", Readiness),
    Operation("/api/hello", "get", "The same as /health/live", Readiness),
    Operation("/health_generate", "get", "The same as /health/generate", Readiness, errors=(503,), error=Readiness),
    Operation("/metrics", "get", "Metrics of the whole mesh", "text/plain"),
    Operation("/version", "get", "The server's version", Version),
    Operation("/tokenizer_info", "get", "The tokenizer's configuration", TokenizerInfo, errors=(500, 503)),
    Operation("/load", "get", "How many calls this gateway is working on", ServerLoad),
    Operation("/openapi.json", "get", "This document", "application/json"),
    Operation("/docs", "get", "A page that shows this document", "text/html"),
    Operation("/", "get", "A page that shows the mesh", "text/html"),
)


_NEUTRAL_VALUES: Final[dict[Any, NeutralValues]] = {
    **dict.fromkeys((CHAT_BODY, COMPLETION_BODY, TokenizeBody, DetokenizeBody), NEUTRAL_VALUES),
    **dict.fromkeys((MessagesBody, CountTokensBody), REFUSED),
    **dict.fromkeys((body for *_, body, _ in _OF_VECTORS), NEUTRAL),
}
"""By body: the fields that it has not and that are refused by name, with the values that change nothing."""


def document(version: str, config: GatewayConfig) -> bytes:
    types: list[Any] = []
    operations = [operation for operation in OPERATIONS if is_served(operation.path, config)]
    if not config.page:
        operations = [operation for operation in operations if operation.path != "/"]
    for operation in operations:
        types += [*operation.answers, *filter(None, (operation.body, operation.error))]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = dict(zip(types, schemas, strict=True))
    for body, neutral_values in _NEUTRAL_VALUES.items():
        if body in refs:
            _name_refused(components[refs[body]["$ref"].rpartition("/")[2]]["properties"], neutral_values)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        if config.makes_text or operation.path not in _OF_TEXT:
            paths.setdefault(operation.path, {})[operation.method] = _operation(operation, refs)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": version, "summary": "OpenAI-compatible gateway of a serving mesh"},
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(whole)


def _name_refused(fields: dict[str, Any], neutral_values: NeutralValues) -> None:
    for field, values in neutral_values.items():
        if field not in fields:
            fields[field] = {"enum": [None, *values], "description": "Other values are not supported and are refused."}


def _operation(operation: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        content: dict[str, Any] = {operation.answer: {}}
    else:
        schemas = [refs[answer] for answer in operation.answers]
        content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    if operation.streams:
        # A schema of one event or of all of them? Readers of this version of OpenAPI differ, so none is given.
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in operation.errors:
        error = {"application/json": {"schema": refs[operation.error]}}
        responses[str(status)] = {"description": "Error", "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        body = {"schema": refs[operation.body], "example": operation.example}
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    if names := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described
