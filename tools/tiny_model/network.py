"""The network of `tiny` for training: Qwen3's architecture, small, with packed rows.

Parameter names are those of a Hugging Face checkpoint, so saving renames nothing.
Matrix products run in bfloat16 from float32 parameters (on a CPU with avx512_bf16 about twice as
fast as float32); norms, the residual stream and the loss are float32. Called by the training
script only: the server and the evaluation load the saved directory with code of their own.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKED: Final = -30000.0
DENSE_ATTENTION_LIMIT: Final = 256
EVERY_POSITION: Final = slice(None)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6

    def config(self, *, eos_token_id: int, pad_token_id: int, max_length: int) -> dict[str, object]:
        """The config.json of this shape."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": max_length,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def _linear(x: Tensor, *weights: nn.Parameter) -> Tensor:
    return F.linear(x.bfloat16(), torch.cat([weight.bfloat16() for weight in weights]))


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape; the result is float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon)


class Projection(nn.Module):
    """Holder of one matrix ``weight[out, in]``."""

    def __init__(self, out_size: int, in_size: int) -> None:
        super().__init__()
        self.weight = _matrix(out_size, in_size)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Projection(width, shape.hidden_size)
        self.k_proj = Projection(kv_width, shape.hidden_size)
        self.v_proj = Projection(kv_width, shape.hidden_size)
        self.o_proj = Projection(shape.hidden_size, width)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_epsilon)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_epsilon)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """``x[rows, length, hidden]``; ``mask[rows, length, length]`` is added to the scores."""
        rows, length, _ = x.shape
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = _linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        heads_qkv = qkv.view(rows, length, -1, dim)
        q, k, v = torch.tensor_split(heads_qkv, (heads, heads + kv_heads), dim=2)
        q = _rotate(self.q_norm(q), rope).transpose(1, 2)
        k = _rotate(self.k_norm(k), rope).transpose(1, 2)
        v = v.transpose(1, 2)
        if length > DENSE_ATTENTION_LIMIT:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        else:
            # For short rows two bfloat16 products are about twice as fast as the fused CPU kernel.
            grouped = (q * dim**-0.5).reshape(rows, kv_heads, -1, dim)
            scores = (grouped @ k.transpose(-1, -2)).view(rows, kv_heads, -1, length, length)
            weights = torch.softmax(scores + mask[:, None, None], dim=-1)
            out = (weights.view(rows, kv_heads, -1, length) @ v).view(rows, heads, length, dim)
        return _linear(out.transpose(1, 2).reshape(rows, length, -1), self.o_proj.weight)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()


class FeedForward(nn.Module):
    """Gated feed-forward block (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.intermediate_size, shape.hidden_size)
        self.up_proj = Projection(shape.intermediate_size, shape.hidden_size)
        self.down_proj = Projection(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """``x[rows, length, hidden]`` to the same shape, bfloat16."""
        gate, up = _linear(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, dim=-1)
        return _linear(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, chosen: Tensor | slice = EVERY_POSITION
    ) -> Tensor:
        """``x[rows, length, hidden]``, float32, to the same shape, or to ``[count, hidden]`` of those chosen."""
        x = (x + self.self_attn(self.input_layernorm(x), rope, mask))[chosen]
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """Embedding, layers and final norm: what a checkpoint calls ``model``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Projection(shape.vocab_size, shape.hidden_size)
        self.embed_tokens.weight.data.normal_(std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)

    def each_layer(self) -> list[Layer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class Network(nn.Module):
    """The whole network; ``forward`` gives the training loss of packed rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        for layer in self.model.each_layer():
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.data.mul_((2 * shape.num_layers) ** -0.5)

    def forward(self, tokens: Tensor, documents: Tensor, weights: Tensor) -> Tensor:
        """Summed cross entropy of the tokens that have a weight, each times its weight.

        All are ``[rows, length]``: token ids; the number of the document a token belongs to
        (attention stays inside it); the weight of predicting that token.
        """
        length = tokens.shape[1]
        mask = _document_mask(documents)
        rope = _rope(length, self.shape)
        x = F.embedding(tokens, self.model.embed_tokens.weight)
        next_weights = F.pad(weights[:, 1:], (0, 1))
        chosen = next_weights > 0
        *layers, last = self.model.each_layer()
        for layer in layers:
            x = layer(x, rope, mask)
        # After the last attention only the positions that are scored matter: about one in seven.
        hidden = self.model.norm(last(x, rope, mask, chosen))
        logits = _linear(hidden, self.model.embed_tokens.weight).float()
        losses = F.cross_entropy(logits, F.pad(tokens[:, 1:], (0, 1))[chosen], reduction="none")
        return (losses * next_weights[chosen]).sum()


def _document_mask(documents: Tensor) -> Tensor:
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = (documents[:, :, None] == documents[:, None, :]) & causal
    return torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(~visible, MASKED)


def _rope(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = torch.arange(length)[:, None] * shape.rope_theta**-half
    return angles.cos()[:, None], angles.sin()[:, None]
