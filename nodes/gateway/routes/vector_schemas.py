"""What `/openapi.json` says of bodies for vectors beyond their types, as `schemas.py` does for others.

Left to errors: that an input fits, that there are as many first texts as second ones, or one. Pure.
"""

from typing import Any, Final

from nodes.gateway.config import GatewayConfig
from nodes.gateway.routes.schemas import (
    KEPT,
    NULL,
    Schema,
    all_of,
    having,
    narrow_fields,
    narrow_priority,
    or_null,
    token_id_of,
)
from nodes.gateway.surfaces.vectors.bodies import EITHER, EXCLUSIVE, NEUTRAL, OF_EMBEDDINGS
from nodes.gateway.surfaces.vectors.embeddings import prompts_of_types
from nodes.models.pooling import Pooling

_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_REQUIRED: Final = {"EmbeddingsBody": "input", "EmbedBody": "inputs"}
_NEEDED: Final = {"ScoreBody": 2}
_BODIES: Final = (
    "EmbeddingsBody", "EmbedBody", "EncodeBody", "ScoreBody", "RerankBody", "AnyRerankBody", "ClassifyBody",
)  # fmt: skip


def narrow_vectors(components: dict[str, Schema], config: GatewayConfig, *, takes_priority: bool) -> None:
    """Write all this into `components`, for those bodies that the model can serve."""
    pooling = config.pooling
    present = [name for name in _BODIES if name in components]
    if pooling is None or not present:
        return
    token_ids: Schema = {"type": "array", "items": token_id_of(config), "minItems": 1}
    texts = _list_of(_TEXT, config)
    for name in present:
        schema = components[name]
        fields = schema["properties"]
        narrow_fields(fields, NEUTRAL, config)
        narrow_priority(fields, takes_priority=takes_priority)
        fields["truncate_prompt_tokens"] = or_null(KEPT)
        if name in _REQUIRED:
            several = _list_of(token_ids, config)
            fields[_REQUIRED[name]] = {"anyOf": [_TEXT, token_ids, texts, several]}
            fields["dimensions"] = or_null(_dimensions(pooling, config))
            _narrow_prompts(schema, _REQUIRED[name], pooling, texts)
        for field in ("text_1", "text_2", "queries", "text") if name != "EmbeddingsBody" else ():
            if field in fields:
                fields[field] = or_null({"anyOf": [_TEXT, texts]})
        if name == "EncodeBody":
            fields["input_ids"] = or_null({"anyOf": [token_ids, _list_of(token_ids, config)]})
            _narrow_embeddings(fields, pooling, config)
        elif name == "ScoreBody":
            fields["documents"] = or_null({"anyOf": [_TEXT, texts]})
        elif name == "ClassifyBody":
            fields["input"] = or_null({"anyOf": [_TEXT, token_ids, texts, _list_of(token_ids, config)]})
        elif "query" in fields:
            documents = _list_of({"anyOf": [_TEXT, {"$ref": "#/components/schemas/DocumentText"}]}, config)
            fields["query"] = _TEXT
            fields["documents"] = documents if name == "RerankBody" else or_null(documents)
        if "texts" in fields:
            fields["texts"] = or_null(texts)
        if "instruct" in fields and pooling.kind != "yes_no":
            fields["instruct"] = {"enum": [None], "description": "The model's template has no place for it."}
        for one, other in EXCLUSIVE.get(name, ()):
            all_of(schema, {"anyOf": [{"properties": {one: NULL}}, {"properties": {other: NULL}}]})
        if name in EITHER:
            _narrow_forms(schema, name)
    if "DocumentText" in components:
        components["DocumentText"]["properties"]["text"] = _TEXT


def _list_of(item: Schema, config: GatewayConfig) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": config.max_inputs_per_call}


def _dimensions(pooling: Pooling, config: GatewayConfig) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": pooling.num_dimensions(config.hidden_size)}


def _narrow_embeddings(fields: dict[str, Schema], pooling: Pooling, config: GatewayConfig) -> None:
    if pooling.kind != "embedding":
        none: Schema = {"enum": [None], "description": "The model gives no embeddings."}
        fields.update(dict.fromkeys(OF_EMBEDDINGS, none))
        return
    fields["dimensions"] = or_null(_dimensions(pooling, config))
    fields["prompt_name"] = _prompt_name(sorted(pooling.prompts))


def _prompt_name(names: list[str]) -> Schema:
    return {"enum": [None, *names], "description": "The model's own prompts."}


def _narrow_prompts(schema: Schema, inputs: str, pooling: Pooling, texts: Schema) -> None:
    fields = schema["properties"]
    fields["prompt_name"] = _prompt_name(sorted(pooling.prompts))
    none: Schema = {"properties": {"prompt_name": NULL}}
    if inputs == "input":
        prompts = prompts_of_types(pooling)
        why = "The prompt that the model has for it, if it has one."
        fields["input_type"] = {"enum": [None, *prompts], "description": why}
        none["properties"]["input_type"] = {"enum": [None, *(name for name, prompt in prompts.items() if not prompt)]}
        sided: Schema = {"properties": {"truncate": {"not": {"enum": ["START", "END"]}}}}
        all_of(schema, {"anyOf": [sided, {"properties": {"truncation_side": NULL}}]})
    # A prompt and ids cannot be joined.
    all_of(schema, {"anyOf": [none, having({inputs: {"anyOf": [_TEXT, texts]}})]})


def _narrow_forms(schema: Schema, name: str) -> None:
    forms = EITHER[name]
    either: list[Any] = []
    for mine, others in (forms, forms[::-1]):
        needed: dict[str, Schema] = {field: {"not": NULL} for field in mine[: _NEEDED.get(name, 1)]}
        rule = having(needed)
        rule["properties"] |= dict.fromkeys(others, NULL)
        either.append(rule)
    all_of(schema, {"anyOf": either})
