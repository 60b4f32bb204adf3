"""Fields of the OpenAI, vLLM and SGLang surfaces that this gateway knows and cannot serve, or may ignore.

Silently dropping a field that has an effect would give a wrong answer, so it is refused by name; its neutral values,
which clients send by default, are accepted. Fields that none of the three knows are accepted and counted.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

NeutralValues: TypeAlias = Mapping[str, tuple[Any, ...]]

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    # Of chats alone, whose prompts are messages.
    "echo": (False,),
    "return_logprob": (False,),
    "logprob_start_len": (),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning": (),
    "require_reasoning": (False,),
    "thinking_token_budget": (),
    "store": (False,),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "lora_path": (),
    "session_params": (),
    "session_id": (),
    "input_ids": (),
    "input_embeds": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "custom_labels": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "return_token_strs": (False,),
    "return_text_in_logprobs": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_meta_info": (False,),
    "skip_reading_prefix_cache": (False,),
    "kv_transfer_params": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "bootstrap_pair_key": (),
    "data_parallel_rank": (),
    "data_parallel_rank_decode": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "decode_tp_size": (),
    "routing_key": (),
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


def is_neutral(value: Any, neutral_values: tuple[Any, ...]) -> bool:
    """Whether a known field has a value that changes nothing. As in JSON, `0` is `0.0` and not `False`."""
    return value is None or any(
        isinstance(value, bool) is isinstance(neutral, bool) and value == neutral for neutral in neutral_values
    )
