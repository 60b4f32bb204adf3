"""Models that need no files: `echo`, and `random:ARCH` with seeded random weights of a real model's shape."""

import math
from typing import Final
from urllib.parse import parse_qsl

import msgspec

from nodes.bundled.byte_tokenizer import BOS_TOKEN, EOS_TOKEN, NUM_BASE_TOKENS, SPECIAL_TOKEN_IDS
from nodes.models.errors import ModelNotFound, ModelUnsupported
from nodes.models.pooling import Pooling
from nodes.models.spec import COMPUTE_DTYPES, EchoTimings, ModelSpec, RopeParameters

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_CONTENT: Final = "{{ messages[-1]['content'] }}"
"""The echo model answers with its prompt, so a chat is answered with exactly the last message's content."""

_SPECIAL_TOKENS: Final = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN, "pad_token": BOS_TOKEN}
_EOS_TOKEN_IDS: Final = (SPECIAL_TOKEN_IDS[EOS_TOKEN], SPECIAL_TOKEN_IDS[BOS_TOKEN])


def _random(name: str, architecture: str, shape: dict[str, int], **others: object) -> ModelSpec:
    fields = {
        "name": f"random:{name}",
        "source": "random",
        "architecture": architecture,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "qkv_bias": architecture == "qwen2",
        "qk_norm": {"qwen3": "head", "qwen3_moe": "head", "gemma3_text": "head", "olmo2": "all"}.get(architecture, ""),
        "eos_token_ids": _EOS_TOKEN_IDS,
        "chat_template": CHATML,
        "special_tokens": _SPECIAL_TOKENS,
    }
    return msgspec.convert({**fields, **shape, **others}, ModelSpec)


def _shape(
    layers: int, hidden: int, inner: int, heads: tuple[int, int, int], vocab: int, context: int
) -> dict[str, int]:
    num_heads, num_kv_heads, head_dim = heads
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "context_length": context,
        "max_context_length": context,
    }


def _encoder(name: str, architecture: str, shape: dict[str, int], **others: object) -> ModelSpec:
    own = {"first_position": 2, "type_vocab_size": 1} if architecture == "xlm-roberta" else {"type_vocab_size": 2}
    fields = {"is_encoder": True, "activation": "gelu_erf", "rms_norm_eps": 1e-12, "pooling": Pooling(pool="mean")}
    plain = {"tie_word_embeddings": False, "chat_template": None, "has_head": False}
    return _random(name, architecture, shape, **fields, **plain, **own, **others)


def _gemma3_layers(layers: int, window: int) -> dict[str, object]:
    """The first five of every six layers slide."""
    sliding = tuple(layer for layer in range(layers) if (layer + 1) % 6)
    return {"sliding_window": window, "sliding_layers": sliding, "rope": _MILLION, "sliding_rope": RopeParameters()}


def _experts(count: int, of_each: int) -> dict[str, object]:
    return {"num_experts": count, "experts_per_token": of_each, "norm_topk_prob": True, "rope": _MILLION}


_MILLION: Final = RopeParameters(theta=1e6)
_LLAMA3: Final = RopeParameters(
    rope_type="llama3", theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192
)

RANDOM_MODELS: Final[dict[str, ModelSpec]] = {
    spec.name.removeprefix("random:"): spec
    for spec in (
        _random("qwen2.5-0.5b", "qwen2", _shape(24, 896, 4864, (14, 2, 64), 151_936, 32_768), rope=_MILLION),
        _random("qwen3-0.6b", "qwen3", _shape(28, 1024, 3072, (16, 8, 128), 151_936, 40_960), rope=_MILLION),
        _random(
            "qwen3-8b", "qwen3", _shape(36, 4096, 12_288, (32, 8, 128), 151_936, 40_960), rope=_MILLION,
            tie_word_embeddings=False,
        ),
        _random(
            "llama-3.2-1b", "llama", _shape(16, 2048, 8192, (32, 8, 64), 128_256, 131_072), rope=_LLAMA3,
            rms_norm_eps=1e-5,
        ),
        _random(
            "mistral-7b", "mistral", _shape(32, 4096, 14_336, (32, 8, 128), 32_000, 32_768), tie_word_embeddings=False,
            rms_norm_eps=1e-5, sliding_window=4096, sliding_layers=tuple(range(32)),
        ),
        _random(
            "olmo2-1b", "olmo2", _shape(16, 2048, 8192, (16, 16, 128), 100_352, 4096), rope=RopeParameters(theta=5e5),
            tie_word_embeddings=False,
        ),
        _random(
            "gemma3-1b", "gemma3_text", _shape(26, 1152, 6912, (4, 1, 256), 262_144, 32_768), attention_scale=1 / 16,
            **_gemma3_layers(26, 512),
        ),
        _random(
            "qwen3-30b-a3b", "qwen3_moe", _shape(48, 2048, 768, (32, 4, 128), 151_936, 40_960),
            tie_word_embeddings=False, **_experts(128, 8),
        ),
        _random("tiny-qwen2", "qwen2", _shape(4, 256, 704, (4, 2, 64), 4096, 8192), rope=_MILLION, dtype="float32"),
        _random("tiny-qwen3", "qwen3", _shape(3, 128, 320, (4, 2, 64), 1024, 8192), rope=_MILLION, dtype="float32"),
        _random(
            "tiny-llama", "llama", _shape(3, 112, 288, (7, 1, 16), 1024, 8192), rope=_LLAMA3, dtype="float32",
            tie_word_embeddings=False,
        ),
        _random(
            "tiny-mistral", "mistral", _shape(3, 128, 320, (4, 1, 64), 1024, 8192), dtype="float32",
            tie_word_embeddings=False, sliding_window=70, sliding_layers=(0, 1, 2),
        ),
        _random(
            "tiny-olmo2", "olmo2", _shape(3, 128, 320, (4, 2, 64), 1024, 8192), dtype="float32",
            tie_word_embeddings=False,
        ),
        _random(
            "tiny-gemma3", "gemma3_text", _shape(6, 96, 256, (4, 1, 64), 1024, 8192), dtype="float32",
            attention_scale=0.2, **_gemma3_layers(6, 40),
        ),
        _random(
            "tiny-qwen3-moe", "qwen3_moe", _shape(3, 128, 96, (4, 2, 64), 1024, 8192), dtype="float32",
            tie_word_embeddings=False, **_experts(16, 4),
        ),
        _encoder("minilm-l6", "bert", _shape(6, 384, 1536, (12, 12, 32), 30_522, 512), dtype="float32"),
        _encoder("tiny-bert", "bert", _shape(3, 66, 130, (6, 6, 11), 1024, 512), dtype="float32"),
        _encoder("tiny-xlm-roberta", "xlm-roberta", _shape(2, 96, 200, (3, 3, 32), 1024, 512), dtype="float32"),
        # Full and sliding layers in one model, as `max_window_layers` gives them.
        _random(
            "tiny-qwen2-sliding", "qwen2", _shape(3, 128, 320, (4, 2, 64), 1024, 8192), rope=_MILLION, dtype="float32",
            sliding_window=40, sliding_layers=(1, 2),
        ),
    )
}  # fmt: skip
"""Real shapes in bfloat16, and small ones in float32 for tests (`tiny-…`)."""

_ECHO: Final = ModelSpec(
    name="echo",
    source="echo",
    architecture="echo",
    num_layers=1,
    # What the echo worker makes vectors of.
    hidden_size=4,
    intermediate_size=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    vocab_size=NUM_BASE_TOKENS,
    context_length=131_072,
    max_context_length=131_072,
    dtype="float32",
    fingerprint="echo",
    eos_token_ids=_EOS_TOKEN_IDS,
    chat_template=LAST_CONTENT,
    special_tokens=_SPECIAL_TOKENS,
)


def echo_model(options: str) -> ModelSpec:
    """The echo model; `options` (after `echo?`) sets `step_ms`, `token_us`, `fatal_token`, finite and not negative."""
    given = _options(options, "echo", ("step_ms", "token_us", "fatal_token"))
    values = {key: _number(value, "echo", key) for key, value in given.items()}
    return msgspec.structs.replace(_ECHO, echo=EchoTimings(**values))


def random_model(architecture: str, options: str) -> ModelSpec:
    """A model of `RANDOM_MODELS`; `options` may set `seed` and `dtype`. Raises ModelNotFound, ModelUnsupported."""
    spec = RANDOM_MODELS.get(architecture)
    if spec is None:
        raise ModelNotFound(f"There is no random model {architecture!r}. Known models: {', '.join(RANDOM_MODELS)}.")
    given = _options(options, spec.name, ("seed", "dtype"))
    seed = int(_number(given.get("seed", "0"), spec.name, "seed"))
    dtype = given.get("dtype", spec.dtype)
    if dtype not in COMPUTE_DTYPES:
        raise ModelUnsupported(f"{spec.name}: dtype {dtype!r} is not supported; use {' or '.join(COMPUTE_DTYPES)}.")
    spec = msgspec.structs.replace(spec, seed=seed, dtype=dtype)
    return msgspec.structs.replace(spec, fingerprint=f"random-{spec.shape_digest().hex()}")


def _options(text: str, model: str, known: tuple[str, ...]) -> dict[str, str]:
    given = dict(parse_qsl(text, keep_blank_values=True))
    if unknown := sorted(set(given) - set(known)):
        raise ModelUnsupported(f"{model} has no option {unknown[0]!r}. Known options: {', '.join(known)}.")
    return given


def _number(text: str, model: str, key: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ModelUnsupported(f"{model}: {key}={text!r} is not a number of at least 0.")
    return value
