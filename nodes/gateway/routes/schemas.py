"""What `/openapi.json` says about bodies beyond their types: limits of the model and of this gateway, and rules between
fields. Whatever the document allows is served, and whatever `jobs/validation.py` refuses, the document does not allow.

What no schema can say is left to errors: that prompt and answer fit the context, that `min_tokens` is at most
`max_tokens`, that samples times prompts are within their limit, what a chat template makes of messages, that the output
is described only once, whether a text is a JSON schema, an expression or a grammar, and which tools and calls in other
fields and messages a field refers to. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from nodes.gateway.config import GatewayConfig
from nodes.gateway.fields.openai_types import REFUSAL_PART, TEXT_PARTS
from nodes.gateway.fields.prompt_fields import NEUTRAL_VERBOSITY
from nodes.gateway.fields.truncation import MOST_KEPT
from nodes.gateway.fields.unsupported import NEUTRAL_VALUES, NeutralValues
from nodes.gateway.surfaces.messages.turns import BLOCKS_OF
from nodes.gateway.surfaces.messages.types import REFUSED
from nodes.request import MAX_TOKEN_ID

Schema = dict[str, Any]

BODIES: Final = ("ChatCompletionBody", "CompletionBody", "TokenizeBody", "DetokenizeBody")
MESSAGES_BODIES: Final = ("MessagesBody", "CountTokensBody")
KEPT: Final[Schema] = {"type": "integer", "minimum": -1, "maximum": MOST_KEPT, "not": {"const": 0}}
"""`truncate_prompt_tokens`."""
NULL: Final[Schema] = {"type": "null"}


def narrow(components: dict[str, Schema], config: GatewayConfig, *, takes_priority: bool) -> None:
    """Write all this into `components`, by type name. `takes_priority`: schedulers heed a request's priority."""
    token_id = token_id_of(config)
    for names, neutral in ((BODIES, NEUTRAL_VALUES), (MESSAGES_BODIES, REFUSED)):
        for name in names:
            narrow_fields(components[name]["properties"], neutral, config)
    for name in BODIES[:2]:
        _narrow_generation(components[name], token_id, config, takes_priority=takes_priority)
    # Of completions, 0 asks for logprobs too.
    for name, asked in (("ChatCompletionBody", {"const": True}), ("CompletionBody", {"type": "integer"})):
        _narrow_logprobs(components[name], asked)
    for name, shows in (("ChatCompletionBody", {}), ("CompletionBody", {"echo": {"const": True}})):
        _narrow_prompt_logprobs(components[name], shows)
    for name in ("ChatCompletionBody", "TokenizeBody"):
        both = {"continue_final_message": {"const": True}, "add_generation_prompt": {"const": True}}
        all_of(components[name], {"not": {"properties": both, "required": list(both)}})
    components["CompletionBody"]["properties"]["prompt"] = _prompt(token_id, config.max_prompts_per_call)
    components["DetokenizeBody"]["properties"]["tokens"]["items"] = token_id
    components["StreamOptions"]["properties"]["include_obfuscation"] = {"enum": [None, False]}
    _narrow_prompt_fields(components["CompletionBody"], components["ChatCompletionBody"], config)
    _narrow_messages(components)
    _narrow_blocks(components)
    responses = components["ResponsesBody"]
    _narrow_sampling(responses, token_id, config, takes_priority=takes_priority)
    _narrow_responses(responses["properties"], components, config)


def token_id_of(config: GatewayConfig) -> Schema:
    """What an id of the model's vocabulary is."""
    return {"type": "integer", "minimum": 0, "maximum": (config.vocab_size or MAX_TOKEN_ID + 1) - 1}


def narrow_fields(fields: Schema, neutral: NeutralValues, config: GatewayConfig) -> None:
    """The model's names, and the values of fields that are refused otherwise."""
    fields["model"] = or_null({"enum": list(config.taken_names)})
    for field, values in neutral.items():
        if field not in fields:
            fields[field] = {"enum": [None, *values], "description": "Other values are not supported and are refused."}


def _narrow_generation(schema: Schema, token_id: Schema, config: GatewayConfig, *, takes_priority: bool) -> None:
    fields = schema["properties"]
    # A prompt has at least one token.
    most = max(1, config.context_length - 1)
    for field in ("max_tokens", "max_completion_tokens"):
        fields[field] = or_null({"type": "integer", "minimum": 0, "maximum": most})
    fields["n"] = or_null({"type": "integer", "minimum": 1, "maximum": min(128, config.max_samples_per_call)})
    fields["logprob_token_ids"]["anyOf"][0]["items"] = token_id
    _narrow_sampling(schema, token_id, config, takes_priority=takes_priority)
    # Stream options without `stream` are refused, not ignored.
    no_options = {"properties": {"stream_options": NULL}}
    all_of(schema, {"anyOf": [no_options, {"properties": {"stream": {"const": True}}, "required": ["stream"]}]})


def _narrow_sampling(schema: Schema, token_id: Schema, config: GatewayConfig, *, takes_priority: bool) -> None:
    fields = schema["properties"]
    fields["min_tokens"] = or_null({"type": "integer", "minimum": 0, "maximum": max(1, config.context_length - 1)})
    fields["truncate_prompt_tokens"] = or_null(KEPT)
    for field in ("stop_token_ids", "allowed_token_ids"):
        fields[field]["anyOf"][0]["items"] = token_id
    fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": f"^(?:{_numbers_up_to(token_id['maximum'])})$"}
    narrow_priority(fields, takes_priority=takes_priority)


def narrow_priority(fields: Schema, *, takes_priority: bool) -> None:
    """Whether schedulers heed it."""
    if not takes_priority:
        fields["priority"] = {
            "enum": [None, 0],
            "description": "Not supported: the schedulers' policy ignores priorities.",
        }


def _narrow_responses(fields: Schema, components: dict[str, Schema], config: GatewayConfig) -> None:
    """What the items, tools and choices of a response need, by their type."""
    fields["model"] = or_null({"enum": list(config.taken_names)})
    most = max(1, config.context_length - 1)
    fields["max_output_tokens"] = or_null({"type": "integer", "minimum": 1, "maximum": most})
    refused: dict[str, list[Any]] = {
        "background": [None, False],
        "conversation": [None],
        "prompt": [None],
        "context_management": [None, []],
        "truncation": [None, "disabled"],
    }
    for field, neutral in refused.items():
        fields[field] = {"enum": neutral, "description": "Other values are not supported and are refused."}
    components["ResponseStreamOptions"]["properties"]["include_obfuscation"] = {"enum": [None, False]}
    string: Schema = {"type": "string"}
    text, thought = having({"type": {"enum": sorted(TEXT_PARTS)}, "text": string}), having({"text": string})
    refusal = having({"type": {"const": REFUSAL_PART}, "refusal": string})
    content: Schema = {"anyOf": [string, {"type": "array", "items": {"anyOf": [text, refusal]}}]}
    thoughts: Schema = {"anyOf": [NULL, string, {"type": "array", "items": thought}]}
    called = {"call_id": string, "name": string}
    items: dict[str, dict[str, Schema]] = {
        "function_call": {**called, "arguments": string},
        "custom_tool_call": {**called, "input": string},
        "function_call_output": {"call_id": string, "output": content},
        "custom_tool_call_output": {"call_id": string, "output": content},
    }
    by_type = [having({"type": {"const": kind}, **needed}) for kind, needed in items.items()]
    reasoning = having({"type": {"const": "reasoning"}})
    reasoning["properties"] |= {"content": thoughts, "summary": thoughts}
    message = {**having({"role": string, "content": content}), "properties": {
        "type": {"const": "message"}, "role": string, "content": content,
    }}  # fmt: skip
    all_of(components["ResponseItem"], {"anyOf": [message, reasoning, *by_type]})
    named = having({"name": {"type": "string"}})
    run_here = ["function", "custom"]
    by_kinds = {"ResponseTool": [*run_here, "namespace"], "NamespacedTool": run_here, "ResponseToolReference": run_here}
    for name, kinds in by_kinds.items():
        all_of(components[name], {"anyOf": [named, {"properties": {"type": {"not": {"enum": kinds}}}}]})
    either = [having({"type": {"const": "allowed_tools"}}), {**named, "properties": {
        **named["properties"], "type": {"enum": ["function", "custom"]},
    }}]  # fmt: skip
    all_of(components["ResponseToolChoice"], {"anyOf": either})
    schema = having({"schema": {"type": "object"}})
    plain = {"properties": {"type": {"enum": ["text", "json_object"]}}}
    all_of(components["ResponseTextFormat"], {"anyOf": [plain, schema]})


def _narrow_logprobs(schema: Schema, asked: Schema) -> None:
    none: dict[str, Schema] = {
        "top_logprobs": {"enum": [None, 0]},
        "logprob_token_ids": {"anyOf": [NULL, {"type": "array", "maxItems": 0}]},
    }
    all_of(schema, {"anyOf": [{"properties": none}, having({"logprobs": asked})]})


def _narrow_prompt_logprobs(schema: Schema, echo: Schema) -> None:
    """`echo` is the field that shows the prompt by itself, if the route has one."""
    read = {"prompt_logprobs": {"type": "integer"}}
    all_of(schema, {"not": having({"stream": {"const": True}, **read})})
    # An answer has a token, unless it is about its prompt.
    some = {field: {"not": {"const": 0}} for field in ("max_tokens", "max_completion_tokens")}
    shown = [having(fields) for fields in (read, echo) if fields]
    all_of(schema, {"anyOf": [{"properties": some}, *shown]})


def _narrow_prompt_fields(text: Schema, chat: Schema, config: GatewayConfig) -> None:
    none, why = {"enum": [None, ""]}, "The served model knows no others."
    if config.fill_in is None:
        text["properties"]["suffix"] = {**none, "description": why}
    else:
        several = {"type": "array", "items": {"type": "string"}}
        filled = {"prompt": {"anyOf": [{"type": "string"}, several]}, "echo": {"enum": [None, False]}}
        all_of(text, {"anyOf": [{"properties": {"suffix": none}}, {"properties": filled}]})
    neutrals: dict[str, Any] = {"documents": [], "verbosity": NEUTRAL_VERBOSITY}
    for field, neutral in neutrals.items():
        if field not in config.template_reads:
            chat["properties"][field] = {"enum": [None, neutral], "description": why}


def _narrow_messages(components: dict[str, Schema]) -> None:
    kinds = {
        "content": ["string", "array"],
        "refusal": ["string"],
        "reasoning": ["string"],
        "reasoning_content": ["string"],
        "thinking": ["string"],
        "tool_calls": ["array"],
        "function_call": ["object"],
    }
    all_of(components["ChatMessage"], {"anyOf": [having({field: {"type": kind}}) for field, kind in kinds.items()]})
    part = components["ContentPart"]
    part["properties"]["type"] = {"enum": [*sorted(TEXT_PARTS), REFUSAL_PART]}
    text = having({"type": {"enum": sorted(TEXT_PARTS)}, "text": {"type": "string"}})
    all_of(part, {"anyOf": [text, having({"type": {"const": REFUSAL_PART}, "refusal": {"type": "string"}})]})
    prompt, messages = {"prompt": {"type": "string"}}, {"messages": {"type": "array"}}
    either = [having(prompt, without="messages"), having(messages, without="prompt")]
    all_of(components["TokenizeBody"], {"anyOf": either})


def _narrow_blocks(components: dict[str, Schema]) -> None:
    """Which blocks the roles of Anthropic's API have, and that an offered tool has a schema."""
    either: list[Schema] = []
    for role, kinds in BLOCKS_OF.items():
        allowed = {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]}
        content: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": allowed}]}
        either.append(having({"role": {"const": role}, "content": content}))
    all_of(components["MessageParam"], {"anyOf": either})
    hosted = having({"type": {"not": {"enum": [None, "custom"]}}})
    all_of(components["MessagesTool"], {"anyOf": [having({"input_schema": {"type": "object"}}), hosted]})


def _prompt(token_id: Schema, most: int) -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    token_ids: Schema = {"type": "array", "items": token_id, "minItems": 1}
    several = [{"type": "array", "items": item, "minItems": 1, "maxItems": most} for item in (text, token_ids)]
    return {"anyOf": [text, token_ids, *several]}


def having(fields: Mapping[str, Schema], *, without: str = "") -> Schema:
    """An object that has all of these, and not the other."""
    absent = {without: NULL} if without else {}
    return {"properties": {**fields, **absent}, "required": list(fields)}


def or_null(schema: Schema) -> Schema:
    """A field that may be left out."""
    return {"anyOf": [schema, NULL], "default": None}


def all_of(schema: Schema, rule: Schema) -> None:
    """A rule beside the others."""
    schema.setdefault("allOf", []).append(rule)


def _numbers_up_to(highest: int) -> str:
    digits = str(highest)
    choices = [f"[1-9][0-9]{{0,{len(digits) - 2}}}", "0"] if len(digits) > 1 else []
    for place, digit in enumerate(digits):
        least = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            choices.append(f"{digits[:place]}[{least}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join([*choices, digits])
