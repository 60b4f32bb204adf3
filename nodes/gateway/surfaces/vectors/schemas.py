"""What `/openapi.json` says of bodies for vectors beyond their types, as `nodes/gateway/schemas.py` does for others.

Left to errors: that an input fits, that there are as many first texts as second ones, or one. Pure.
"""

from typing import Any, Final

from nodes.gateway.config import GatewayConfig
from nodes.gateway.schemas import (
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
from nodes.gateway.surfaces.vectors.bodies import EITHER, NEUTRAL

_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_REQUIRED: Final = {"EmbeddingsBody": "input", "EmbedBody": "inputs"}
_NEEDED: Final = {"ScoreBody": 2}
_BODIES: Final = ("EmbeddingsBody", "EmbedBody", "ScoreBody", "RerankBody", "AnyRerankBody", "ClassifyBody")


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
            most = pooling.num_dimensions(config.hidden_size)
            fields["dimensions"] = or_null({"type": "integer", "minimum": 1, "maximum": most})
            _narrow_prompts(schema, _REQUIRED[name], sorted(pooling.prompts), texts)
        for field in ("text_1", "text_2", "queries", "text") if name != "EmbeddingsBody" else ():
            if field in fields:
                fields[field] = or_null({"anyOf": [_TEXT, texts]})
        if name == "ScoreBody":
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
        if name in EITHER:
            _narrow_forms(schema, name)
    if "DocumentText" in components:
        components["DocumentText"]["properties"]["text"] = _TEXT


def _list_of(item: Schema, config: GatewayConfig) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": config.max_inputs_per_call}


def _narrow_prompts(schema: Schema, inputs: str, names: list[str], texts: Schema) -> None:
    schema["properties"]["prompt_name"] = {"enum": [None, *names], "description": "The model's own prompts."}
    # A prompt and ids cannot be joined.
    none: Schema = {"properties": {"prompt_name": NULL}}
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
