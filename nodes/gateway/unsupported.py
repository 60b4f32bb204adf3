"""Fields of the OpenAI, vLLM and SGLang surfaces that this gateway knows and cannot serve, or may ignore.

A field with an effect that is silently dropped gives a wrong answer, so it is refused by name; its neutral values,
which clients send by default, are taken.
"""

from typing import Any

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "lora_path": (),
    "session_params": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_strs": (False,),
    "kv_transfer_params": (),
}
"""By field: the values that change nothing. `null` is one of them for every field."""

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
    }
)
"""Fields without an effect on the answer's text."""


def is_neutral(field: str, value: Any) -> bool:
    """Whether a known field has a value that changes nothing. `0` is not `False` here."""
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[field])
