"""Records a model: `Ops` whose values stand for future rows, so that a network's calls become a list of operations.

Hidden states, and what products make of them, stay in float32; what products read is in the model's dtype.
"""

from typing import Any, Final

import torch
from typing_extensions import override

from kvstore.layout import KVLayout
from nodes.model_spec import ModelSpec, RopeParameters
from nodes.models.architecture import Architecture
from nodes.models.ops import Ops
from nodes.models.parts import Activated, Attention, Embedding, Experts, Gated, LayerNorm, Linear, Norm
from nodes.models.tensor_parallel import Shard
from nodes.worker.ops.native.attention import MAX_BLOCK_ROWS, MAX_HEAD_DIM, AttendCall
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.packed_weight import DTYPES, PackedWeight, row_bytes
from nodes.worker.ops.native.program import (
    ACTIVATED,
    ACTIVATIONS,
    ATTEND,
    COMBINE,
    CONVERT,
    DRAW,
    EMBED,
    GATED,
    GATHER,
    HEAD,
    LAYER_NORM,
    NORM,
    POOL,
    PRODUCT,
    ROUTE,
    SELECT,
    WRITE,
    Program,
    ProgramUnfit,
    Recorder,
    Value,
    operation,
)
from nodes.worker.ops.native.weights import Weights

_FLOAT_BYTES: Final = 4
"""A float32."""
_CHOICE_BYTES: Final = 12
"""`Choice` of mixture.h."""


class Recording(Ops[Value]):
    """`Ops` that compute nothing and list operations. Raises ProgramUnfit for what the kernels do not support."""

    def __init__(self, spec: ModelSpec, library: Library, weights: Weights, layout: KVLayout, shard: Shard) -> None:
        self._spec = spec
        self._library = library
        self._shard = shard
        self._weights = weights
        self._layout = layout
        self._dtype = weights.dtype
        self._recorder = Recorder()
        # The values in the model's dtype, by number; their size does not tell, as it may be the same as in float32.
        self._rounded: set[int] = set()
        self._selected_of: Value | None = None
        self.ropes: list[RopeParameters | None] = []
        """The rotary embedding of each recorded attention, if it has one."""

    def program(self, model: Architecture) -> Program:
        """`model` as a list. The model's weights must outlive the list."""
        model.run(self)
        return Program(self._library, self._recorder, DTYPES[self._dtype])

    @override
    def embed(self, by: Embedding) -> Value:
        weight = self._weights.embedding
        is_packed = isinstance(weight, PackedWeight)
        y = self._wide(weight.depth if is_packed else weight.shape[1])
        # Rounded as the weights are.
        scale = float(torch.tensor(by.scale, dtype=self._dtype))
        at = weight.at if is_packed else weight.data_ptr()
        added = {"positions": by.positions, "types": by.types}
        tables = {name: self._weights.tables[one.name].data_ptr() for name, one in added.items() if one is not None}
        self._recorder.append(EMBED, None, y, n=y.width, weight=at, is_int8=is_packed, scale=scale, **tables)
        # For a token that another rank holds, these are zeros.
        return self._recorder.sum_over_ranks(y) if self._shard.size > 1 else y

    @override
    def norm(self, x: Value, by: Norm, add: Value | None = None) -> Value:
        """Records a norm; `add` is a hidden state, which is updated in place and stays one."""
        self._require_wide(x)
        fields = {"n": x.width, "weight": self._weights.norms[by.weight.name].data_ptr(), "eps": by.eps}
        if add is None:
            y = self._round(x.width, is_selected=x.is_selected)
            self._recorder.append(NORM, x, y, **fields)
            return y
        self._require_wide(add)
        self._recorder.append(NORM, x, add, add=add, **fields)
        return add

    @override
    def layer_norm(self, x: Value, by: LayerNorm) -> Value:
        """Records a norm of hidden states in place."""
        self._require_wide(x)
        weight, bias = (self._weights.norms[one.name].data_ptr() for one in (by.weight, by.bias))
        self._recorder.append(LAYER_NORM, x, x, n=x.width, weight=weight, bias=bias, eps=by.eps)
        return x

    @override
    def linear(self, x: Value, by: Linear, add: Value | None = None) -> Value:
        """Records a product; `add` is updated in place."""
        x = self._narrow(x)
        fields, is_part = self._product(by), by.is_summed and self._shard.size > 1
        # A part is summed over the ranks first: `add` would be in the sum once for each of them.
        y = self._wide(fields["n"], is_selected=x.is_selected) if add is None or is_part else add
        self._recorder.append(PRODUCT, x, y, add=None if is_part else add, **fields)
        return self._recorder.sum_over_ranks(y, add) if is_part else y

    @override
    def gated(self, x: Value, by: Gated) -> Value:
        """Records gate and up as one product, the activation in its epilogue."""
        x, fields = self._narrow(x), self._gated(by)
        y = self._round(fields["n"], is_selected=x.is_selected)
        self._recorder.append(GATED, x, y, **fields)
        return y

    @override
    def activated(self, x: Value, by: Activated) -> Value:
        """Records a product with the activation in its epilogue."""
        x, fields = self._narrow(x), self._product(by.linear)
        y = self._round(fields["n"], is_selected=x.is_selected)
        self._recorder.append(ACTIVATED, x, y, activation=ACTIVATIONS[by.activation], **fields)
        return y

    @override
    def moe(self, x: Value, by: Experts, add: Value) -> Value:
        """Records the choice of experts, the two products of those that were chosen, and their sum.

        Rows go through the products sorted by expert, `top_k` for each row.
        """
        recorder, x = self._recorder, self._narrow(x)
        routed = {"num_experts": len(by.experts), "top_k": by.top_k}
        gated, down = [self._gated(one) for one, _ in by.experts], [self._product(one) for _, one in by.experts]
        scores = self.linear(x, by.router)
        choices = recorder.value(by.top_k, _CHOICE_BYTES)
        recorder.append(ROUTE, scores, choices, is_normalized=by.normalized, **routed)
        # Sorted by expert, so that each expert's weights are read once for a step, not once for a row.
        gathered = self._round(x.width, per_row=by.top_k)
        recorder.append(GATHER, x, gathered, choices=choices, n=x.width, **routed)
        inner = self._round(gated[0]["n"], per_row=by.top_k)
        recorder.append_experts([operation(GATED, gathered, inner, **fields) for fields in gated], gathered, inner)
        outer = recorder.value(add.width, _FLOAT_BYTES, per_row=by.top_k)
        recorder.append_experts([operation(PRODUCT, inner, outer, **fields) for fields in down], inner, outer)
        if self._shard.size == 1:
            recorder.append(COMBINE, outer, add, add=add, choices=choices, n=add.width, **routed)
            return add
        total = self._wide(add.width)
        recorder.append(COMBINE, outer, total, choices=choices, n=add.width, **routed)
        return recorder.sum_over_ranks(total, add)

    @override
    def attend(self, qkv: Value, by: Attention) -> Value:
        """Records the writing of keys and values, then attention over the pages."""
        layout, heads, index = self._layout, self._shard.num_heads, len(self._recorder.attends)
        if by.layer != index:
            raise ProgramUnfit(f"layer {by.layer} attends as number {index + 1}: it would use another layer's pages")
        is_odd = layout.head_dim % 2 and by.rope is not None
        if layout.head_dim > MAX_HEAD_DIM or is_odd or heads // layout.num_kv_heads > MAX_BLOCK_ROWS:
            raise ProgramUnfit(
                f"native attention supports even head sizes up to {MAX_HEAD_DIM} and up to {MAX_BLOCK_ROWS} query heads"
                f" per KV head, not {layout.head_dim} and {heads // layout.num_kv_heads}"
            )
        value_bytes = layout.page_bytes // (2 * layout.num_layers)
        call = AttendCall(
            stride=qkv.width,
            page_bytes=layout.page_bytes,
            value_bytes=value_bytes,
            page_size=layout.page_size,
            heads=heads,
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            window=self._spec.layer_windows[by.layer],
            sees_all=self._spec.is_encoder,
            scale=by.scale,
        )
        if by.q_norm is not None and by.k_norm is not None:
            query, key = (self._weights.norms[norm.weight.name] for norm in (by.q_norm, by.k_norm))
            if self._spec.qk_norm == "head":
                call.q_norm, call.k_norm, call.eps = query.data_ptr(), key.data_ptr(), by.q_norm.eps
            else:
                # All query heads together, and all key heads together, in place.
                for norm, begin in ((query, 0), (key, len(query))):
                    fields = {"n": len(norm), "k": begin, "weight": norm.data_ptr(), "eps": by.q_norm.eps}
                    self._recorder.append(NORM, qkv, qkv, **fields)
        out = self._round(heads * layout.head_dim)
        self.ropes.append(by.rope)
        self._recorder.attends.append(call)
        self._recorder.attended.append((qkv, out))
        self._recorder.append(WRITE, qkv, out, attend=index)
        self._recorder.append(ATTEND, qkv, out, attend=index)
        return out

    @override
    def pool(self, x: Value, by: Norm | None = None) -> None:
        """Records the copy of the pooled rows, which go to the step."""
        self._require_wide(x)
        weight = None if by is None else self._weights.norms[by.weight.name].data_ptr()
        eps = 0.0 if by is None else by.eps
        self._recorder.append(POOL, x, x, n=x.width, weight=weight, eps=eps)

    @override
    def select(self, x: Value) -> Value:
        self._require_wide(x)
        y = self._wide(x.width, is_selected=True)
        self._recorder.append(SELECT, x, y, n=x.width)
        self._selected_of = x
        return y

    @override
    def head(self, x: Value, by: Linear) -> Value:
        """Records the head. The logits, or a rank's part, go to the step; the value returned is never read."""
        x, fields = self._narrow(x), self._product(by)
        self._recorder.append(HEAD, x, x, **fields)
        self._recorder.append(DRAW, x, x, n=fields["n"])
        if self._selected_of is not None:
            # The head may be run again on other rows, where a prompt is read.
            self._recorder.keep(self._selected_of)
        return x

    def _product(self, by: Linear | Gated) -> dict[str, Any]:
        weight = self._weights.products[by.name]
        shape = {"n": weight.width, "k": weight.depth}
        return {**shape, "weight": weight.at, "bias": weight.bias_at, "is_int8": weight.is_int8}

    def _gated(self, by: Gated) -> dict[str, Any]:
        return {**self._product(by), "activation": ACTIVATIONS[by.activation]}

    def _wide(self, width: int, *, is_selected: bool = False) -> Value:
        return self._recorder.value(width, _FLOAT_BYTES, is_selected=is_selected)

    def _narrow(self, x: Value) -> Value:
        """`x` as products read it."""
        # In a float32 model nothing is rounded, and hidden states are read as they are.
        if x.number in self._rounded or self._dtype == torch.float32:
            return x
        y = self._round(x.width, is_selected=x.is_selected)
        self._recorder.append(CONVERT, x, y, n=x.width)
        return y

    def _round(self, width: int, *, is_selected: bool = False, per_row: int = 1) -> Value:
        """A value of rows in the model's dtype, as the kernels keep them."""
        item_bytes = row_bytes(self._library, self._dtype)
        y = self._recorder.value(width, item_bytes, is_selected=is_selected, per_row=per_row)
        self._rounded.add(y.number)
        return y

    def _require_wide(self, x: Value) -> None:
        if x.number in self._rounded and self._dtype != torch.float32:
            raise ProgramUnfit("the model normalises or selects rows that are already rounded")
