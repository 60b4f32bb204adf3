"""The base of encoders, BERT (Devlin et al. 2018): each position attends to its whole sequence, and there is no head.

Embeddings of words, positions and types are added up. Norms are layer norms behind what is added, and the feed-forward
layers have no gate. An encoder is computed by one worker alone, a sequence at once.
"""

from typing import Any, ClassVar, Final, NamedTuple

from typing_extensions import override

from nodes.models.architecture import Architecture
from nodes.models.config_fields import ConfigFields
from nodes.models.ops import Ops, Value
from nodes.models.parts import Activated, Attention, Embedding, LayerNorm, Linear, Parameter, joined, linear
from nodes.models.spec import Activation, ModelSpec

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class EncoderLayer(NamedTuple):
    """The parts of one layer."""

    qkv: Linear
    attention: Attention
    output: Linear
    attention_norm: LayerNorm
    inner: Activated
    outer: Linear
    outer_norm: LayerNorm


class Encoder(Architecture):
    """One encoder. Fields missing from `config.json` get the defaults that transformers has for it."""

    body: ClassVar[str] = ""
    """What the names of all tensors but those of heads begin with."""
    default_eps: ClassVar[float] = 1e-12

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        hidden, prefix = spec.hidden_size, f"{self.body}embeddings."
        tables = (
            ("word", spec.vocab_size),
            ("position", spec.first_position + spec.context_length),
            ("token_type", spec.type_vocab_size),
        )
        words, positions, types = (
            Parameter(f"{prefix}{name}_embeddings.weight", (rows, hidden)) for name, rows in tables
        )
        self.embedding = Embedding(words, 1.0, positions, types, spec.first_position)
        self.embedding_norm = self._norm(f"{prefix}LayerNorm")
        self.layers = [self._layer(index, f"{self.body}encoder.layer.{index}.") for index in range(spec.num_layers)]

    @property
    @override
    def parts(self) -> list[object]:
        return [self.embedding, self.embedding_norm, self.layers]

    @classmethod
    @override
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        config.require("position_embedding_type", None, "absolute")
        for key in ("is_decoder", "add_cross_attention"):
            if config.boolean(key):
                raise config.unsupported(key, "is true: only encoders are served with this architecture")
        config.require("hidden_act", None, *_ACTIVATIONS)
        shape = config.shape(is_rotated=False)
        hidden, heads = shape["hidden_size"], shape["num_heads"]
        if hidden % heads:
            raise config.damaged("hidden_size", f"is not a multiple of num_attention_heads ({heads})")
        first, positions = cls._first_position(config), config.integer("max_position_embeddings", 512)
        if positions <= first:
            raise config.damaged("max_position_embeddings", f"is {positions}, of which the first {first} are not used")
        return {
            **shape,
            "num_kv_heads": heads,
            "head_dim": hidden // heads,
            "context_length": positions - first,
            "max_context_length": positions - first,
            "rms_norm_eps": config.number("layer_norm_eps", cls.default_eps),
            "tie_word_embeddings": False,
            "is_encoder": True,
            "first_position": first,
            "type_vocab_size": config.integer("type_vocab_size", 2),
            "activation": _ACTIVATIONS[config.value("hidden_act") or "gelu"],
        }

    @override
    def run(self, ops: Ops[Value]) -> Value:
        """The last hidden states of the sampled rows, of which plans have none; the rows that are pooled are kept."""
        x = ops.layer_norm(ops.embed(self.embedding), self.embedding_norm)
        for layer in self.layers:
            # Norms stand behind each sum and take its place: the sum itself is read by nobody else.
            attended = ops.attend(ops.linear(x, layer.qkv), layer.attention)
            x = ops.layer_norm(ops.linear(attended, layer.output, add=x), layer.attention_norm)
            inner = ops.activated(x, layer.inner)
            x = ops.layer_norm(ops.linear(inner, layer.outer, add=x), layer.outer_norm)
        ops.pool(x)
        return ops.select(x)

    @classmethod
    def _first_position(cls, config: ConfigFields) -> int:
        """The row of the first position among the embeddings of positions."""
        del config
        return 0

    def _layer(self, index: int, prefix: str) -> EncoderLayer:
        spec, attention = self.spec, f"{prefix}attention."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        own = (linear(f"{attention}self.{name}", hidden, hidden, bias=True) for name in ("query", "key", "value"))
        return EncoderLayer(
            qkv=joined(*own),
            # Positions are in the embeddings: nothing is rotated.
            attention=Attention(index, None, spec.head_dim**-0.5),
            output=linear(f"{attention}output.dense", hidden, hidden, bias=True),
            attention_norm=self._norm(f"{attention}output.LayerNorm"),
            inner=Activated(linear(f"{prefix}intermediate.dense", inner, hidden, bias=True), spec.activation),
            outer=linear(f"{prefix}output.dense", hidden, inner, bias=True),
            outer_norm=self._norm(f"{prefix}output.LayerNorm"),
        )

    def _norm(self, name: str) -> LayerNorm:
        shape = (self.spec.hidden_size,)
        return LayerNorm(
            Parameter(f"{name}.weight", shape, mean=1.0), Parameter(f"{name}.bias", shape), self.spec.rms_norm_eps
        )
