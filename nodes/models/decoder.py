"""The base of all models that write: rotary embedding, grouped attention, gated feed-forward layers, RMS norms.

An architecture is a subclass of `Decoder` that overrides what is read from a `config.json`, the parts of a layer, or
the order in which a layer's parts are computed. Its file names it as `ARCHITECTURE`.
"""

from typing import Any, ClassVar, Literal, NamedTuple

from typing_extensions import override

from nodes.models.architecture import Architecture
from nodes.models.config_fields import ConfigFields
from nodes.models.ops import Ops, Value
from nodes.models.parts import Attention, Embedding, Gated, Linear, Norm, Parameter, joined, linear
from nodes.models.pooling import Dense
from nodes.models.rope_fields import max_context, read_rope
from nodes.models.spec import ModelSpec, RopeParameters
from nodes.models.tensor_parallel import Cut

Columns = Literal["inner", "dense"]
"""Which width a feed-forward layer has, `intermediate_size` or `dense_size`, and which columns of it a rank holds."""


class Layer(NamedTuple):
    """The parts of one decoder layer."""

    attention_norm: Norm
    qkv: Linear
    attention: Attention
    output: Linear
    mlp_norm: Norm
    gated: Gated
    down: Linear


class Decoder(Architecture):
    """One model with a head that says which token may be next."""

    default_head_dim: ClassVar[int] = 0
    norm_offset: ClassVar[float] = 0.0
    activation: ClassVar[tuple[str, ...]] = ("hidden_act", "silu", "swish")
    """The field that names it, and the values that it may have, which all mean the same."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        vocabulary = (spec.vocab_size, spec.hidden_size), Cut(0, "vocab")
        self.embedding = self._embedding(Parameter("model.embed_tokens.weight", *vocabulary))
        self.layers: list[Any] = [self._layer(index, f"model.layers.{index}.") for index in range(spec.num_layers)]
        self.norm = self._norm("model.norm", spec.hidden_size)
        own = Parameter("lm_head.weight", *vocabulary)
        # A tied head is the embedding's parameter under the same name, and is loaded once.
        self.head = Linear((self.embedding.weight if spec.tie_word_embeddings else own,))

    @classmethod
    @override
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        config.require(cls.activation[0], None, *cls.activation[1:])
        bias = config.boolean("attention_bias")
        shape = config.shape(cls.default_head_dim)
        rope = cls._rope(config, shape["head_dim"])
        most, reason = max_context(rope, config.context_length)
        return {
            **shape,
            **cls._windows(config, most),
            "rope": rope,
            "max_context_length": most,
            "max_context_reason": reason,
            "qkv_bias": bias,
            "o_bias": bias,
        }

    @classmethod
    @override
    def class_head(cls, hidden: int, num_classes: int) -> tuple[Dense, ...]:
        return (Dense(hidden, num_classes, "score.weight"),)

    @classmethod
    def _rope(cls, config: ConfigFields, head_dim: int) -> RopeParameters:
        return read_rope(config, head_dim)

    @classmethod
    def _windows(cls, config: ConfigFields, context_length: int) -> dict[str, Any]:
        """The window, if a context of `context_length`, the most that is served, is longer than it."""
        return config.windows(None, context_length)

    @property
    @override
    def parts(self) -> list[object]:
        return [self.embedding, self.layers, self.norm, self.head]

    @override
    def run(self, ops: Ops[Value]) -> Value:
        x = ops.embed(self.embedding)
        for layer in self.layers:
            x = self._run_layer(ops, layer, x)
        if self.spec.pooling is not None:
            ops.pool(x, self.norm)
        # At most one row of a prompt's chunk, 256 tokens by default, is sampled: the others need no logits.
        return ops.head(ops.norm(ops.select(x), self.norm), self.head)

    def _run_layer(self, ops: Ops[Value], layer: Any, x: Value) -> Value:
        attended = ops.attend(ops.linear(ops.norm(x, layer.attention_norm), layer.qkv), layer.attention)
        x = ops.linear(attended, layer.output, add=x)
        return self._feed_forward(ops, layer, ops.norm(x, layer.mlp_norm), x)

    def _feed_forward(self, ops: Ops[Value], layer: Any, normed: Value, x: Value) -> Value:
        return ops.linear(ops.gated(normed, layer.gated), layer.down, add=x)

    def _layer(self, index: int, prefix: str) -> Any:
        """The parts of layer `index`, whose tensors' names begin with `prefix`."""
        hidden = self.spec.hidden_size
        return Layer(
            attention_norm=self._norm(f"{prefix}input_layernorm", hidden),
            qkv=self._qkv(f"{prefix}self_attn."),
            attention=self._attention(index, f"{prefix}self_attn."),
            output=self._output(f"{prefix}self_attn."),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", hidden),
            gated=self._gated(f"{prefix}mlp."),
            down=self._down(f"{prefix}mlp."),
        )

    def _embedding(self, weight: Parameter) -> Embedding:
        return Embedding(weight)

    def _norm(self, name: str, size: int) -> Norm:
        offset = self.norm_offset
        return Norm(Parameter(f"{name}.weight", (size,), mean=1 - offset), self.spec.rms_norm_eps, offset)

    def _qkv(self, prefix: str) -> Linear:
        spec = self.spec
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        # One product whose outputs lie side by side, as `Ops.attend` takes them.
        return joined(
            linear(f"{prefix}q_proj", query, spec.hidden_size, Cut(0, "heads"), bias=spec.qkv_bias),
            linear(f"{prefix}k_proj", key, spec.hidden_size, Cut(0, "kv_heads"), bias=spec.qkv_bias),
            linear(f"{prefix}v_proj", key, spec.hidden_size, Cut(0, "kv_heads"), bias=spec.qkv_bias),
        )

    def _attention(self, index: int, prefix: str) -> Attention:
        spec = self.spec
        norms: tuple[Norm, ...] = ()
        if spec.qk_norm:
            q, k = (1, 1) if spec.qk_norm == "head" else (spec.num_heads, spec.num_kv_heads)
            norms = (self._norm(f"{prefix}q_norm", q * spec.head_dim), self._norm(f"{prefix}k_norm", k * spec.head_dim))
        rope = spec.sliding_rope if spec.sliding_rope and index in spec.sliding_layers else spec.rope
        return Attention(index, rope, spec.attention_scale or spec.head_dim**-0.5, *norms)

    def _output(self, prefix: str) -> Linear:
        spec = self.spec
        query = spec.num_heads * spec.head_dim
        return linear(f"{prefix}o_proj", spec.hidden_size, query, Cut(1, "heads"), bias=spec.o_bias)

    def _gated(self, prefix: str, by: Columns = "inner") -> Gated:
        spec = self.spec
        size = self._width(by), spec.hidden_size, Cut(0, by)
        gate, up = (linear(f"{prefix}{name}_proj", *size, bias=spec.mlp_bias) for name in ("gate", "up"))
        return Gated(gate, up)

    def _down(self, prefix: str, by: Columns = "inner") -> Linear:
        spec = self.spec
        return linear(f"{prefix}down_proj", spec.hidden_size, self._width(by), Cut(1, by), bias=spec.mlp_bias)

    def _width(self, by: Columns) -> int:
        return self.spec.dense_size if by == "dense" else self.spec.intermediate_size
