"""Llama, Mistral, Qwen2 and Qwen3 for a device: few large kernels in the place of the CPU's many fused small ones.

A second definition beside `models.llama`, because it is another schedule of the same network: queries, keys and values
come from one product and gate and up from one, the residual is added by the norm that follows, everything is rounded to
the compute dtype between kernels, and nothing depends on the number of rows or waits for the host, so that it can be
captured. What both share are the names of the weights and the rotary frequencies.

With `Collectives` it is one rank's part of the network (Shoeybi et al. 2019): two sums over the ranks in each layer,
behind the attention's output and behind down, one for the embedding, and the logits gathered, so that every rank has
the same ones and draws the same tokens. Embedding and head are both cut by the vocabulary, tied or not: together they
are a tenth to a half of a model's weights, and one sum more among dozens is cheap.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.registry import parameters
from nodes.worker.cuda.attention import DeviceAttention
from nodes.worker.cuda.kernels import Kernels, cos_sin_table
from nodes.worker.device_memory import SUMMED_ROWS
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.weights.loader import RankWeights, WeightSource


class _Product(NamedTuple):
    """A linear layer: weight `[out, in]`, bias `[out]` or none."""

    weight: Tensor
    bias: Tensor | None


class _Layer(NamedTuple):
    """Weights of one decoder layer; head norms are there for Qwen3."""

    attention_norm: Tensor
    qkv: _Product
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: _Product
    mlp_norm: Tensor
    gate_up: _Product
    down: _Product


class DeviceNetwork:
    """The weights of one model on `device`, or one rank's parts of them, and the forward pass.

    `tile_rows` > 0 runs every product in calls of so many rows: a row's bits then do not depend on how many rows are
    computed with it, as far as one kernel is chosen for one shape. Sums over ranks are then taken in the ranks' order.

    Raises TensorParallelUnfit, or what `weights` raises, which are always the whole model's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        kernels: Kernels,
        device: torch.device,
        tile_rows: int = 0,
        collectives: Collectives | None = None,
    ) -> None:
        self.spec = spec
        self.collectives = collectives
        self._shard = shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
        parts, table = RankWeights(weights, shard), parameters(spec)
        self.device = device
        self.kernels = kernels
        self._tile_rows = tile_rows
        self._eps = spec.rms_norm_eps

        def on_device(name: str) -> Tensor:
            return parts.tensor(table[name]).to(device)

        self._embedding = on_device("model.embed_tokens.weight")
        self.dtype = self._embedding.dtype
        self._layers = [
            _load_layer(spec, on_device, f"model.layers.{index}.", shard.rank) for index in range(spec.num_layers)
        ]
        self._norm = on_device("model.norm.weight")
        self._head = self._embedding if spec.tie_word_embeddings else on_device("lm_head.weight")
        self._cos_sin = cos_sin_table(spec, device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables on the device; a head that is tied to the embedding counts once."""
        tensors = [self._embedding, self._norm, self._cos_sin]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            for part in layer:
                tensors += [part] if isinstance(part, Tensor) else [t for t in part or () if t is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: DeviceAttention, sampled: Tensor | None
    ) -> Tensor:
        """Logits `[len(sampled), vocab]` of the rows `sampled` (None: all); KV of all rows is written to the pages.

        `token_ids` and `positions` are int32 `[rows]`; `attention` has been planned for these rows.
        """
        kernels, eps = self.kernels, self._eps
        residual = self._embed(token_ids)
        x = kernels.rms_norm(residual, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, positions)
            x = self._summed(self._product(attention.attend(index, q, k, v), layer.output))
            kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._summed(self._product(kernels.silu_and_mul(self._product(x, layer.gate_up)), layer.down))
            last = index + 1 == len(self._layers)
            kernels.add_rms_norm(x, residual, self._norm if last else self._layers[index + 1].attention_norm, eps)
        return self._logits(x if sampled is None else x.index_select(0, sampled))

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.collectives is None:
            return self._embedding.index_select(0, token_ids)
        rows = token_ids - self._shard.vocab.start
        num_rows = len(self._shard.vocab)
        found = self._embedding.index_select(0, rows.clamp(0, num_rows - 1))
        elsewhere = (rows < 0) | (rows >= num_rows)
        # Exact: all ranks but one add zeros.
        return self._summed(found.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._product(x, _Product(self._head, None))
        if self.collectives is None:
            return logits
        return self.collectives.all_gather(logits)[:, : self.spec.vocab_size]

    def _summed(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks; may overwrite it."""
        if self.collectives is None:
            return x
        if not self._tile_rows:
            return self.collectives.all_reduce(x)
        # A library chooses the order of its sums by the size of the message.
        return torch.cat([_summed_in_order(self.collectives, rows) for rows in torch.split(x, SUMMED_ROWS)])

    def _project(self, layer: _Layer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shard = self._shard
        heads = self._product(x, layer.qkv).view(x.shape[0], -1, shard.head_dim)
        q, k, v = torch.split(heads, [shard.num_heads, shard.num_kv_heads, shard.num_kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            self.kernels.head_norm(q, layer.query_norm, self._eps)
            self.kernels.head_norm(k, layer.key_norm, self._eps)
        self.kernels.rotate(positions, q, k, self._cos_sin)
        return q, k, v

    def _product(self, x: Tensor, by: _Product) -> Tensor:
        if not self._tile_rows:
            return F.linear(x, by.weight, by.bias)
        num_rows = x.shape[0]
        tiles = torch.split(F.pad(x, (0, 0, 0, -num_rows % self._tile_rows)), self._tile_rows)
        return torch.cat([F.linear(tile, by.weight, by.bias) for tile in tiles])[:num_rows]


def _summed_in_order(collectives: Collectives, x: Tensor) -> Tensor:
    first, *others = collectives.all_gather(x).view(x.shape[0], collectives.size, -1).unbind(1)
    total = first.float()
    for part in others:
        total = total + part
    return total.to(x.dtype)


def _load_layer(spec: ModelSpec, tensor: Callable[[str], Tensor], prefix: str, rank: int) -> _Layer:
    def joined(names: tuple[str, ...], bias: bool) -> _Product:
        weight = torch.cat([tensor(f"{prefix}{name}.weight") for name in names])
        return _Product(weight, torch.cat([tensor(f"{prefix}{name}.bias") for name in names]) if bias else None)

    return _Layer(
        attention_norm=tensor(f"{prefix}input_layernorm.weight"),
        qkv=joined(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), spec.qkv_bias),
        query_norm=tensor(f"{prefix}self_attn.q_norm.weight") if spec.qk_norm else None,
        key_norm=tensor(f"{prefix}self_attn.k_norm.weight") if spec.qk_norm else None,
        # What is added to a sum over all ranks is added by one of them.
        output=joined(("self_attn.o_proj",), spec.o_bias and rank == 0),
        mlp_norm=tensor(f"{prefix}post_attention_layernorm.weight"),
        gate_up=joined(("mlp.gate_proj", "mlp.up_proj"), spec.mlp_bias),
        down=joined(("mlp.down_proj",), spec.mlp_bias and rank == 0),
    )
