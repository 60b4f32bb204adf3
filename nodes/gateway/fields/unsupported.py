"""Fields of the OpenAI, vLLM and SGLang surfaces that this gateway knows and cannot serve, or may ignore.

Silently dropping a field that has an effect would give a wrong answer, so it is refused by name; its neutral values,
which clients send by default, are accepted. Fields that none of the three knows are accepted and counted.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

NeutralValues: TypeAlias = Mapping[str, tuple[Any, ...]]

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # Of chats alone, or of completions alone, whose own names for the same are served.
    "top_logprobs": (0,),
    "echo": (False,),
    # SGLang's native names for logprobs, whose answers have another form than OpenAI's: they are for /generate.
    "return_logprob": (False,),
    "logprob_start_len": (),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_text_in_logprobs": (False,),
    # Several candidates computed for one that is shown: a step has no beams.
    "best_of": (1,),
    "use_beam_search": (False,),
    # Grammars are enforced by one library, which writes white space in one way.
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # Stops are found as texts and ids alone, and a text that ends at one ends before it.
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    # Nothing but text goes in and comes out.
    "audio": (),
    "modalities": (["text"],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "use_audio_in_video": (False,),
    # Services of OpenAI's around a model.
    "moderation": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    # What bounds or demands reasoning by a count of its tokens; `reasoning_effort` is served.
    "reasoning": (),
    "require_reasoning": (False,),
    "thinking_token_budget": (),
    # A template of a client's own would run for all others, too: `--chat-template` is the operator's.
    "chat_template": (),
    # There are no adapters.
    "lora_path": (),
    # There are no sessions at a scheduler: the prefix cache does what they are for.
    "session_params": (),
    "session_id": (),
    # Prompts of other kinds than text and ids in `prompt`.
    "input_ids": (),
    "input_embeds": (),
    "prompt_embeds": (),
    # Code of a client's own, or fields for it.
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "custom_labels": ({},),
    "vllm_xargs": ({},),
    # What steps do not bring back.
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    # Other forms of what answers have already.
    "return_token_strs": (False,),
    "return_meta_info": (False,),
    # Half of a request whose other half a router sends elsewhere: here handoffs are the mesh's own.
    "kv_transfer_params": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "bootstrap_pair_key": (),
}
"""By field: the values that change nothing. `null` is one of them for every field."""

IGNORED = frozenset(
    {
        # Said for the client's own books, or for OpenAI's.
        "client_metadata",
        "metadata",
        "safety_identifier",
        "service_tier",
        # About caches and places: answers are the same, and routes follow cached prefixes and load.
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "skip_reading_prefix_cache",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "decode_tp_size",
        "routing_key",
        # Without an effect but in beam search, which is refused.
        "length_penalty",
        "early_stopping",
        # Tokenizers of today put no spaces between special tokens.
        "spaces_between_special_tokens",
    }
)
"""Fields without an effect on the answer's text."""


def is_neutral(value: Any, neutral_values: tuple[Any, ...]) -> bool:
    """Whether a known field has a value that changes nothing. As in JSON, `0` is `0.0` and not `False`."""
    return value is None or any(
        isinstance(value, bool) is isinstance(neutral, bool) and value == neutral for neutral in neutral_values
    )
