"""`/openapi.json`, generated from the types that decode and encode, so that it cannot say anything else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from nodes.gateway.openai_types import (
    ChatCompletion,
    ChatCompletionBody,
    Completion,
    CompletionBody,
    DetokenizeBody,
    DetokenizedText,
    ErrorBody,
    ModelCard,
    ModelList,
    Readiness,
    TokenizeBody,
    Tokenized,
    Version,
)


class Operation(NamedTuple):
    """One route: what it takes and gives. `answer` is a type, or a media type where the answer is not JSON."""

    path: str
    method: str
    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    errors: Sequence[int] = ()
    streams: bool = False


_GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_TOKENIZER_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503)

OPERATIONS = (
    Operation("/v1/models", "get", "The served models", ModelList),
    Operation("/v1/models/{model_id}", "get", "One model", ModelCard, errors=(404,)),
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a chat",
        ChatCompletion,
        ChatCompletionBody,
        _GENERATION_ERRORS,
        streams=True,
    ),
    Operation("/v1/completions", "post", "Continue text", Completion, CompletionBody, _GENERATION_ERRORS, streams=True),
    Operation("/tokenize", "post", "Token ids of a prompt or chat", Tokenized, TokenizeBody, _TOKENIZER_ERRORS),
    Operation("/detokenize", "post", "Text of token ids", DetokenizedText, DetokenizeBody, _TOKENIZER_ERRORS),
    Operation("/health/live", "get", "Whether the gateway turns", Readiness),
    Operation("/health/ready", "get", "Whether a request can be served", Readiness, errors=(503,)),
    Operation("/metrics", "get", "Metrics of the whole mesh", "text/plain"),
    Operation("/version", "get", "The server's version", Version),
    Operation("/openapi.json", "get", "This document", "application/json"),
    Operation("/", "get", "A status page", "text/html"),
)


def document(version: str) -> bytes:
    """The whole document as JSON."""
    types: list[Any] = [ErrorBody]
    for operation in OPERATIONS:
        types += [kind for kind in (operation.answer, operation.body) if kind is not None and not isinstance(kind, str)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, refs)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": version, "summary": "OpenAI-compatible gateway of a serving mesh"},
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(whole)


def _operation(operation: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        content: dict[str, Any] = {operation.answer: {}}
    else:
        content = {"application/json": {"schema": refs[operation.answer]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in operation.errors:
        # Readiness says in its own form what is missing.
        schema = refs[Readiness] if operation.answer is Readiness else refs[ErrorBody]
        responses[str(status)] = {"description": "Error", "content": {"application/json": {"schema": schema}}}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        schema = refs[operation.body]
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model_id}" in operation.path:
        described["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described
