"""`ModelSpec`: the shape of one model and where its files are. `VocabularyFacts`: what its tokenizer says."""

import hashlib
from typing import Final, Literal

import msgspec

from kvstore.layout import KVLayout
from mesh.wire.message import Part
from nodes.models.fill_in import FillIn
from nodes.models.pooling import Pooling
from nodes.models.tensor_parallel import Shard, shard_of
from nodes.request import SamplingDefaults

Quantization = Literal["none", "int8"]
Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu"]
COMPUTE_DTYPES: Final = ("float32", "bfloat16")


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: `linear` divides all frequencies by `factor`, `llama3` only the low ones, with a smooth
    transition; so does `yarn` (Peng et al. 2023), by their turns in the original context; `longrope` (Ding et al. 2024)
    divides each by its own entry of `divisors`, or of `short_divisors` if the model's context is longer than the
    original one but no more than the original is requested. `dynamic` has all frequencies, of `longest_theta` in place
    of `theta` if more than the context of config.json is requested. `attention_factor` multiplies cosines and sines.
    """

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()
    longest_theta: float = 0.0


class EchoTimings(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step of the echo model takes: `step_ms` milliseconds and `token_us` microseconds per token.

    `fatal_token`: a step that computes this token kills its worker, as a broken kernel would; -1: no such token.
    """

    step_ms: float = 0.0
    token_us: float = 0.0
    fatal_token: float = -1.0


class AddedText(msgspec.Struct, frozen=True, kw_only=True):
    """A token that files beside `tokenizer.json` name, with the flags of `tokenizers.AddedToken`; -1: without an id.

    `normalized` None: unless it is special, or turns out to be.
    """

    content: str
    id: int = -1
    special: bool = True
    normalized: bool | None = None
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class VocabularyFacts(Part, frozen=True):
    """What only a loaded tokenizer says: how many ids it has, the id of the `eos_token` that its files name, and the
    tokens by which it is asked for a middle, if it has any.
    """

    num_tokens: int
    eos_token_id: int | None = None
    fill_in: FillIn | None = None


class WeightsRead(Part, frozen=True):
    """What reading the files of a model's weights found: the hash of all their bytes, and in which state they were.

    `state` is a hash of what the file system says of each file; a file that changes has another. With `is_settled` the
    files had been as they were for long enough that any later change is seen by that.
    """

    digest: str
    state: str
    is_settled: bool


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model: its shape as in `config.json`, its ids and texts, and the absolute paths of its files.

    `context_length` is what config.json says, or the longer one that was requested (`within`). `max_context_length` is
    the most that may be requested (0: that of config.json), `max_context_reason` why it is more: `YaRN: 64 × 4`.

    `dtype` is the checkpoint's dtype. The worker computes in it unless configured otherwise, except for float16, which
    it never computes in (`compute_dtype`). `sampling_defaults` come from `generation_config.json`. `notes` are
    sentences for whoever starts the model: what of its files is left out, or costs something. `eos_token_ids` come from
    `generation_config.json` and `config.json`; the first one ends a chat turn. `tokenizer_path` is empty if the
    tokenizer is built in code (see `nodes.model_spec.vocabulary`). `special_tokens` are the texts that chat templates
    may name (`bos_token`, `eos_token`, ...); they and `added_tokens` are added to the tokenizer when it is loaded, but
    with `own_ids_win` none whose id it gives to a token of its own. With `split_special_tokens` texts of special tokens
    in a prompt are encoded like any text. If a model has several chat templates and none is
    the default, `named_templates` has their names. `said_by` says in which file something stands: `chat_template`,
    `special_tokens.NAME`, `eos_token_ids.ID`. `fingerprint` is equal only for equal weights and configuration; until a
    directory's `weights` are read it is empty.

    `architecture` is one of `nodes.models.registry.ARCHITECTURES`, or `echo`. `qk_norm`: queries and keys are
    normalised before they are rotated, each head by itself or all heads of a position together.

    `attention_scale` multiplies the scores (0: `head_dim ** -0.5`). With `num_experts`, a position's feed-forward layer
    is `experts_per_token` of that many experts, each `intermediate_size` wide, weighted by their shares in the router's
    softmax (`norm_topk_prob`: scaled to sum to one), except in the layers `dense_layers`, which have none and are
    `dense_size` wide. `sliding_rope` is for sliding layers, if theirs differs.

    With `quantization` set to `int8`, weights are rounded to int8 when they are loaded (`quantized`).

    `fill_in` are the tokens by which it is asked for a middle (None: not known, or none), `template_reads` the
    variables that the chat template in use reads, of those that requests have fields for; a plan fills both in.

    `pooling` says how it makes vectors; None: it makes none. A model without a head of words (`has_head`) makes nothing
    else: its embedding stands in for the head where one is computed, and what that says means nothing.

    An encoder (`is_encoder`) sees its whole sequence at each position and has no head: all it makes are vectors. Its
    embeddings of positions begin at row `first_position`, those of types have `type_vocab_size` rows, and `activation`
    stands between the two products of its feed-forward layers.

    In the layers `sliding_layers` a position sees `sliding_window` positions including itself (0: no layer slides).
    """

    name: str
    source: Literal["directory", "random", "echo"]
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    dtype: str
    fingerprint: str = ""
    rms_norm_eps: float = 1e-6
    rope: RopeParameters = RopeParameters()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    attention_scale: float = 0.0
    sliding_rope: RopeParameters | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk_prob: bool = False
    eos_token_ids: tuple[int, ...] = ()
    path: str = ""
    tokenizer_path: str = ""
    chat_template: str | None = None
    named_templates: tuple[str, ...] = ()
    special_tokens: dict[str, str] = {}
    added_tokens: tuple[AddedText, ...] = ()
    own_ids_win: bool = False
    split_special_tokens: bool = False
    said_by: dict[str, str] = {}
    weight_files: tuple[str, ...] = ()
    seed: int = 0
    echo: EchoTimings = EchoTimings()
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    notes: tuple[str, ...] = ()
    quantization: Quantization = "none"
    max_context_length: int = 0
    max_context_reason: str = ""
    dense_layers: tuple[int, ...] = ()
    dense_size: int = 0
    fill_in: FillIn | None = None
    template_reads: tuple[str, ...] = ()
    pooling: Pooling | None = None
    has_head: bool = True
    is_encoder: bool = False
    first_position: int = 0
    type_vocab_size: int = 0
    activation: Activation = "silu"
    weights: WeightsRead | None = None

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Per layer, how many positions a position sees, including itself; 0: all up to itself."""
        sliding = frozenset(self.sliding_layers)
        return tuple(self.sliding_window if layer in sliding else 0 for layer in range(self.num_layers))

    def quantized(self, how: Quantization) -> "ModelSpec":
        """The model with weights quantised to `how`. The fingerprint changes, because the KV pages differ."""
        if how == "none" or self.source == "echo":
            return self
        return msgspec.structs.replace(self, quantization=how, fingerprint=f"{self.fingerprint}-{how}")

    def within(self, context_length: int) -> "ModelSpec":
        """The model for sequences of at most `context_length` tokens, as the user requested (0: no request).

        A context above config.json's is served up to `max_context_length`. A model with LongRoPE has other divisors
        within its original context, and one with dynamic RoPE another base beyond config.json's, so both have another
        fingerprint then: their keys are rotated differently. Only a request selects them. A context length derived from
        free memory must not, or the same command would give other texts on a machine with less memory.
        """
        rope, longer = self.rope, min(context_length, self.max_context_length)
        if longer > self.context_length:
            spec = msgspec.structs.replace(self, context_length=longer)
            if not rope.longest_theta:
                return spec
            return _rotated(spec, "long", theta=rope.longest_theta, longest_theta=0.0)
        if not rope.short_divisors or not 0 < context_length <= rope.original_context_length:
            return self
        # `attention_factor` stays: transformers, too, takes it from the config alone, whatever the length of a call.
        return _rotated(self, "short", divisors=rope.short_divisors, short_divisors=())

    def compute_dtype(self, dtype: str = "auto") -> str:
        """The dtype to compute in: `auto` is the model's own; others must be float32 or bfloat16 (ValueError).

        For a float16 model `auto` is float32, which has all of float16's bits and range; `cli/plan/compute_dtype.py`
        knows the device and may choose bfloat16 instead.
        """
        own = "float32" if self.dtype == "float16" else self.dtype
        chosen = own if dtype == "auto" or self.source == "echo" else dtype
        if chosen not in COMPUTE_DTYPES:
            raise ValueError(f"cannot compute in dtype {dtype!r}; use auto, {' or '.join(COMPUTE_DTYPES)}")
        return chosen

    def kv_layout(self, dtype: str = "auto", page_size: int = 16, tp_rank: int = 0, tp_size: int = 1) -> KVLayout:
        """Layout of the KV pool of one rank of this model; `dtype` as for `compute_dtype`.

        Raises TensorParallelUnfit if the model cannot be cut for `tp_size` ranks.
        """
        # The echo model computes nothing that could be cut: each rank keeps all of it.
        num_kv_heads = 1 if self.source == "echo" else self.shard(tp_rank, tp_size).num_kv_heads
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.compute_dtype(dtype),
            page_size=page_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            total_kv_heads=0 if num_kv_heads * tp_size == self.num_kv_heads else self.num_kv_heads,
            fingerprint=self.fingerprint,
        )

    def shard(self, tp_rank: int = 0, tp_size: int = 1) -> Shard:
        """What one rank of a tensor-parallel group holds of this model. Raises TensorParallelUnfit."""
        return shard_of(self, tp_rank, tp_size)

    def shape_digest(self) -> bytes:
        """A 16-byte digest of what the weights' shapes and the computation depend on, without names and file paths."""
        shape = msgspec.structs.replace(
            self, name="", fingerprint="", path="", tokenizer_path="", chat_template=None, named_templates=(),
            special_tokens={}, added_tokens=(), own_ids_win=False, split_special_tokens=False, said_by={},
            weight_files=(), weights=None, eos_token_ids=(), echo=EchoTimings(), dtype="",
            sampling_defaults=SamplingDefaults(), notes=(), max_context_reason="", pooling=None,
        )  # fmt: skip
        return hashlib.blake2b(msgspec.json.encode(shape), digest_size=16).digest()


def _rotated(spec: ModelSpec, name: str, **changes: object) -> ModelSpec:
    rope = msgspec.structs.replace(spec.rope, **changes)
    return msgspec.structs.replace(spec, rope=rope, fingerprint=f"{spec.fingerprint}-{name}")
