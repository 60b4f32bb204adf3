"""A model over torch, on any device: `Ops` of a few large kernels.

Queries, keys and values come from one product, gate and up from another, the norm that follows adds the residual,
everything is rounded to the compute dtype between kernels, and nothing depends on the number of rows or waits for the
host, so that a run can be captured.

With `Collectives` it is one rank's part of the network (Shoeybi et al. 2019): two sums over the ranks in each layer,
after the attention's output and after down, one for the embedding, and the logits are gathered, so that every rank has
the same ones and draws the same tokens. Embedding and head are both cut by the vocabulary, tied or not: together they
are a tenth to a half of a model's weights, and one sum more among dozens is cheap.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from nodes.model_spec import ModelSpec, RopeParameters
from nodes.models.ops import Ops
from nodes.models.parts import (
    Activated,
    Activation,
    Attention,
    Embedding,
    Experts,
    Gated,
    LayerNorm,
    Linear,
    Norm,
    Parameter,
    parts_of,
)
from nodes.models.registry import model_of
from nodes.worker.ops.torch.attention import DeviceAttention, HeadForm
from nodes.worker.ops.torch.few_rows import FewRows
from nodes.worker.ops.torch.hidden import Hidden, Unnormed, Value
from nodes.worker.ops.torch.kernels import Kernels, activated, cos_sin_table, layer_norm
from nodes.worker.ops.torch.mixture import mixture
from nodes.worker.ops.torch.products import Product, can_pack, make_product
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.device_memory import SUMMED_ROWS
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.part_weights import PartWeights


class HeadTiles(NamedTuple):
    """The first `num_drawn` sampled rows give logits as usual; those of the others go to `take`, `num_rows` at once.

    `take` also gets the number of the first of them, counted behind those that are drawn.
    """

    num_drawn: int
    num_rows: int
    take: Callable[[Tensor, int], None]


class _Step(NamedTuple):
    """What all layers share."""

    token_ids: Tensor
    positions: Tensor
    attention: DeviceAttention
    sampled: Tensor | None
    tiles: HeadTiles | None
    pooled: Tensor | None
    types: Tensor | None


class DeviceNetwork(Ops[Value]):
    """The weights of one model on `device`, or one rank's parts of them, and `Ops` on its tensors.

    `tile_rows` as for `make_product`; with it, sums over ranks on a device are taken in the ranks' order. `few_rows`
    computes products of few rows, if it is given.

    Raises TensorParallelUnfit, or what `source` raises. `source` always has the tensors of the whole model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        kernels: Kernels,
        device: torch.device,
        tile_rows: int = 0,
        collectives: Collectives | None = None,
        few_rows: FewRows | None = None,
    ) -> None:
        self.spec = spec
        self.model = model = model_of(spec)
        self.collectives = collectives
        self._shard = shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
        weights = PartWeights(model, source, shard, device)
        self.device = device
        self.kernels = kernels
        self._tile_rows = tile_rows
        self._embedding = weights.embedding
        self.dtype = self._embedding.dtype
        parts, tables = model.parts, (model.embedding.positions, model.embedding.types)
        # Read as the embedding is, and added to it.
        self._tables = {one.name: weights.table(one) for one in tables if one is not None}
        # Else in the dtype of what they are multiplied with, as devices' kernels take them.
        dtype = torch.float32 if kernels.has_wide_norms else self.dtype
        self._norms = {one.weight.name: weights.norm(one).to(dtype) for one in parts_of((Norm,), parts)}
        for norm in parts_of((LayerNorm,), parts):
            self._norms |= zip((norm.weight.name, norm.bias.name), weights.layer_norm(norm), strict=True)
        self._few_rows = few_rows
        # Weight and bias of each product, for `few_rows`; other products may keep theirs in an order of their own.
        self._weights: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._products: dict[str, Product] = {}
        self._product_bytes = 0
        # Numbers in each row that a product takes, by its part's name.
        self.depths: dict[str, int] = {}
        for part in parts_of((Gated, Linear), parts):
            own = (part.gate, part.up) if isinstance(part, Gated) else (part,)
            weight, bias = weights.product(*own)
            self._products[part.name] = make_product(weight, bias, tile_rows)
            # Only references: on a device products keep weights as they are.
            if few_rows is not None:
                self._weights[part.name] = weight, bias
            self.depths[part.name] = weight.shape[1]
            taken = [one for one in (weight, bias) if one is not None and one is not self._embedding]
            self._product_bytes += sum(one.nbytes for one in taken)
        ropes = dict.fromkeys(attention.rope for attention in parts_of((Attention,), parts))
        self._cos_sin: dict[RopeParameters, Tensor] = {
            rope: cos_sin_table(spec, rope, device) for rope in ropes if rope is not None
        }
        self._forms: dict[int, HeadForm] = {}
        self._step: _Step | None = None
        self.states: Tensor | None = None
        """Of the last step that pooled: the last hidden states of the rows that it named, float32 `[rows, hidden]`."""

    def take_states(self) -> Tensor | None:
        """`states`, which are then forgotten: those of a mean over 8,192 tokens of 4,096 numbers take 134 MB."""
        states, self.states = self.states, None
        return states

    @property
    def can_capture(self) -> bool:
        """Whether no operation waits for computed numbers, and there are steps of single rows that begin anywhere."""
        return not (self.spec.num_experts or self.spec.is_encoder)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables on the device; a head that is tied to the embedding counts once."""
        tensors = [self._embedding, *self._tables.values(), *self._norms.values(), *self._cos_sin.values()]
        return self._product_bytes + sum(tensor.nbytes for tensor in tensors)

    @property
    def product_kernels(self) -> str:
        """What computes products on the CPU: oneDNN on packed weights, or torch on plain ones."""
        return "plain" if self._tile_rows or not can_pack(self.device, self.dtype) else "packed"

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: DeviceAttention,
        sampled: Tensor | None,
        tiles: HeadTiles | None = None,
        pooled: Tensor | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """Logits `[len(sampled), vocab]` of the rows `sampled` (None: all); KV of all rows is written to the pages.

        With `tiles`, some of them are given away as they are computed, and not returned. The states of the rows
        `pooled` are left in `states`.

        `token_ids`, `positions` and `types` (None: all 0) are int32 `[rows]`; `attention` has been planned for them.
        """
        self._step = _Step(token_ids, positions, attention, sampled, tiles, pooled, types)
        try:
            return rows_of(self.model.run(self))
        finally:
            self._step = None

    @override
    def embed(self, by: Embedding) -> Value:
        """Hidden states `[rows, hidden]` of the step's tokens."""
        token_ids = self._planned.token_ids
        if self.collectives is None:
            found = self._embedding.index_select(0, token_ids)
        else:
            rows = token_ids - self._shard.vocab.start
            num_rows = len(self._shard.vocab)
            found = self._embedding.index_select(0, rows.clamp(0, num_rows - 1))
            elsewhere = (rows < 0) | (rows >= num_rows)
            # Exact: all ranks but one add zeros.
            found = self._summed(found.masked_fill_(elsewhere.unsqueeze(1), 0))
        if by.positions is not None and by.types is not None:
            return Hidden(self._placed(found, by.positions, by.types, by.first_position))
        # Rounded as in training.
        return Hidden(found if by.scale == 1 else found.mul_(float(torch.tensor(by.scale, dtype=found.dtype))))

    def _placed(self, words: Tensor, positions: Parameter, types: Parameter, first: int) -> Tensor:
        """`words` with the embeddings of their positions and types added, rounded once."""
        step, of_types = self._planned, self._tables[types.name]
        own = of_types[:1] if step.types is None else of_types.index_select(0, step.types)
        places = self._tables[positions.name].index_select(0, step.positions + first)
        return (words.float() + own.float() + places.float()).to(words.dtype)

    @override
    def norm(self, x: Value, by: Norm, add: Value | None = None) -> Value:
        """RMS norm of each row of `x`, with `add` added after it."""
        weight = self._norms[by.weight.name]
        if not isinstance(x, Hidden):
            normed = self.kernels.rms_norm(rows_of(x), weight, by.eps)
        else:
            later = Unnormed(x, weight, by.eps, self.kernels)
            # With `add` the result is hidden states, which the next norm reads and no product takes.
            if add is None and self._few_rows is not None and self._few_rows.takes_norm(*x.rows.shape):
                return later
            normed = later.normed()
        return normed if add is None else _added(normed, add)

    @override
    def layer_norm(self, x: Value, by: LayerNorm) -> Value:
        weight, bias = (self._norms[one.name] for one in (by.weight, by.bias))
        return Hidden(layer_norm(rows_of(x), weight, bias, by.eps))

    @override
    def linear(self, x: Value, by: Linear, add: Value | None = None) -> Value:
        """The product `[rows, out]` of `x` and the part's weight, with `add` added to it."""
        product = self._product(by.name, x)
        if by.is_summed:
            product = self._summed(product)
        return product if add is None else _added(product, add)

    @override
    def gated(self, x: Value, by: Gated) -> Value:
        """`activation(gate(x)) * up(x)`, `[rows, inner]`."""
        by_few = self._by_few_rows(by.name, x, by.activation)
        return self.kernels.gated(self._products[by.name](rows_of(x)), by.activation) if by_few is None else by_few

    @override
    def activated(self, x: Value, by: Activated) -> Value:
        return activated(self._product(by.linear.name, x), by.activation)

    @override
    def moe(self, x: Value, by: Experts, add: Value) -> Value:
        """Waits for the device, which alone knows how many rows each expert has."""
        rows = rows_of(x)

        def expert(number: int, some: Tensor) -> Tensor:
            gated, down = by.experts[number]
            return self._product(down.name, self.gated(some, gated))

        scores = self._products[by.router.name](rows)
        # Added up over ranks once, not for each expert.
        return _added(self._summed(mixture(rows, scores, by, expert).to(rows.dtype)), add)

    @override
    def attend(self, qkv: Value, by: Attention) -> Value:
        """Attention over the layer's pages `[rows, heads * head_dim]`; keys and values are written first."""
        shard, step = self._shard, self._planned
        rows = rows_of(qkv)
        heads = rows.view(rows.shape[0], -1, shard.head_dim)
        q, k, v = torch.split(heads, [shard.num_heads, shard.num_kv_heads, shard.num_kv_heads], 1)
        form = self._forms.get(by.layer) or self._form_of(by)
        is_placed = step.attention.place(by.layer, heads, form, step.positions)
        if not is_placed:
            for weight, eps, part in ((form.q_weight, form.q_eps, q), (form.k_weight, form.k_eps, k)):
                if weight is not None:
                    # Over each head, or over all heads of a row together, which lie side by side.
                    self.kernels.head_norm(part.view(part.shape[0], -1, weight.shape[0]), weight, eps)
            if form.cos_sin is not None:
                self.kernels.rotate(step.positions, q, k, form.cos_sin)
            if form.q_scale != 1:
                q = q * form.q_scale
        return step.attention.attend(by.layer, q, k, v, is_placed=is_placed)

    def _form_of(self, by: Attention) -> HeadForm:
        """Kept: it is asked for by every layer of every step."""
        q_weight, k_weight = (None if one is None else self._norms[one.weight.name] for one in (by.q_norm, by.k_norm))
        q_eps, k_eps = (0.0 if one is None else one.eps for one in (by.q_norm, by.k_norm))
        # Attention always scales by `head_dim ** -0.5`.
        own = self._shard.head_dim**-0.5
        q_scale = 1.0 if by.scale == own else by.scale / own
        form = HeadForm(q_weight, k_weight, q_eps, k_eps, q_scale, by.rope and self._cos_sin[by.rope])
        self._forms[by.layer] = form
        return form

    @override
    def pool(self, x: Value, by: Norm | None = None) -> None:
        pooled = self._planned.pooled
        if pooled is not None:
            # A copy of these rows: the norm adds what is pending, which is still needed where tokens are drawn.
            rows = _selected(x, pooled)
            self.states = rows_of(rows if by is None else self.norm(rows, by)).float()

    @override
    def select(self, x: Value) -> Value:
        sampled = self._planned.sampled
        return x if sampled is None else _selected(x, sampled)

    @override
    def head(self, x: Value, by: Linear) -> Value:
        """Logits `[sampled rows, vocab]`."""
        # Numerics are tried out outside of any step.
        rows, tiles = rows_of(x), None if self._step is None else self._step.tiles
        if tiles is None:
            return self._logits(rows, by)
        drawn, others = rows[: tiles.num_drawn], rows[tiles.num_drawn :]
        for begin in range(0, len(others), tiles.num_rows):
            tiles.take(self._logits(others[begin : begin + tiles.num_rows], by), begin)
        return self._logits(drawn, by)

    def _logits(self, rows: Tensor, by: Linear) -> Tensor:
        logits = self._product(by.name, rows)
        if self.collectives is None:
            return logits
        return self.collectives.all_gather(logits)[:, : self.spec.vocab_size]

    def _product(self, name: str, x: Value) -> Tensor:
        by_few = self._by_few_rows(name, x)
        return self._products[name](rows_of(x)) if by_few is None else by_few

    def _by_few_rows(self, name: str, x: Value, activation: Activation | None = None) -> Tensor | None:
        """The product by the kernel for few rows, norm and activation included; None if there is none for this."""
        if self._few_rows is None:
            return None
        weight, bias = self._weights[name]
        # Asked for each product: a step of one row takes it for all, one of two for small weights alone.
        if not self._few_rows.takes(weight, _num_rows(x), activation):
            return None
        return self._few_rows.product(x if isinstance(x, Unnormed) else rows_of(x), weight, bias, activation)

    @property
    def _planned(self) -> _Step:
        assert self._step is not None, "an operation outside of a step"
        return self._step

    def _summed(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks; may overwrite it."""
        if self.collectives is None:
            return x
        if not self._tile_rows or self.device.type == "cpu":
            return self.collectives.all_reduce(x)
        # A collective library chooses the order of its sums by the size of the message.
        return torch.cat([_summed_in_order(self.collectives, rows) for rows in torch.split(x, SUMMED_ROWS)])


def _summed_in_order(collectives: Collectives, x: Tensor) -> Tensor:
    first, *others = collectives.all_gather(x).view(x.shape[0], collectives.size, -1).unbind(1)
    total = first.float()
    for part in others:
        total = total + part
    return total.to(x.dtype)


def rows_of(x: Value) -> Tensor:
    """`x` as a tensor to compute with; what was pending of hidden states is added first."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Unnormed):
        return x.normed()
    if x.pending is not None:
        x.rows.add_(x.pending)
        x.pending = None
    return x.rows


def _num_rows(x: Value) -> int:
    return (x if isinstance(x, Tensor) else x.hidden.rows if isinstance(x, Unnormed) else x.rows).shape[0]


def _selected(x: Value, which: Tensor) -> Value:
    if not isinstance(x, Hidden):
        return rows_of(x).index_select(0, which)
    return Hidden(x.rows.index_select(0, which), x.pending if x.pending is None else x.pending.index_select(0, which))


def _added(product: Tensor, add: Value) -> Hidden:
    """Hidden states with one more product pending."""
    assert isinstance(add, Hidden), "products are added to hidden states only"
    rows_of(add)
    add.pending = product
    return add
