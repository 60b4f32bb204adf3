"""Records a model: `Ops` whose values are rows to come, so that what a network asks becomes a list of operations.

Hidden states, and what products make of them, stay in float32; what products read is in the model's dtype.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from nodes.model_spec import ModelSpec, RopeParameters
from nodes.models.decoder import Decoder
from nodes.models.parts import Attention, Embedding, Experts, Gated, Linear, Norm
from nodes.worker.ops.native.attention import AttendCall
from nodes.worker.ops.native.library import Library
from nodes.worker.ops.native.linear import DTYPES, NativeNorm, PackedWeight
from nodes.worker.ops.native.program import (
    ATTEND,
    CONVERT,
    DRAW,
    EMBED,
    GATED,
    HEAD,
    NORM,
    PRODUCT,
    SELECT,
    WRITE,
    Program,
    ProgramUnfit,
    Recorder,
    Value,
)

_FLOAT_BYTES: Final = 4


class Weights(NamedTuple):
    """A model's weights as the kernels read them: products and norms by the names of their parts."""

    embedding: Tensor
    products: dict[str, PackedWeight]
    norms: dict[str, NativeNorm]


class Recording:
    """See `Ops`. Raises ProgramUnfit for what the kernels have no operation for."""

    def __init__(self, spec: ModelSpec, weights: Weights, layout: KVLayout) -> None:
        self._spec = spec
        self._weights = weights
        self._layout = layout
        self._dtype = weights.embedding.dtype
        self._recorder = Recorder()
        self.ropes: list[RopeParameters] = []
        """Of each attention that was recorded."""

    def program(self, library: Library, model: Decoder) -> Program:
        """`model` as a list. Its weights must outlive it."""
        model.run(self)
        return Program(library, self._recorder, DTYPES[self._dtype])

    def embed(self, by: Embedding) -> Value:
        """Records the look-up of the step's tokens."""
        weight = self._weights.embedding
        y = self._wide(weight.shape[1])
        # Rounded as the weights are.
        scale = float(torch.tensor(by.scale, dtype=self._dtype))
        self._recorder.append(EMBED, None, y, n=y.width, weight=weight.data_ptr(), scale=scale)
        return y

    def norm(self, x: Value, by: Norm, add: Value | None = None) -> Value:
        """See `Ops`. What is added to is a hidden state, and stays one."""
        norm = self._weights.norms[by.weight.name]
        self._require_wide(x)
        fields = {"n": x.width, "weight": norm.weight.data_ptr(), "eps": by.eps}
        if add is None:
            y = self._recorder.value(x.width, self._dtype.itemsize, is_selected=x.is_selected)
            self._recorder.append(NORM, x, y, **fields)
            return y
        self._require_wide(add)
        self._recorder.append(NORM, x, add, add=add, **fields)
        return add

    def linear(self, x: Value, by: Linear, add: Value | None = None) -> Value:
        """Records a product; what is added to is written in place."""
        weight, x = self._weights.products[by.name], self._narrow(x)
        y = self._wide(weight.width, is_selected=x.is_selected) if add is None else add
        self._recorder.append(PRODUCT, x, y, add=add, **_product(weight))
        return y

    def gated(self, x: Value, by: Gated) -> Value:
        """Records gate and up as one product, the activation in its epilogue."""
        weight, x = self._weights.products[by.name], self._narrow(x)
        y = self._recorder.value(weight.width, self._dtype.itemsize, is_selected=x.is_selected)
        self._recorder.append(GATED, x, y, is_gelu=by.activation == "gelu_tanh", **_product(weight))
        return y

    def moe(self, x: Value, by: Experts, add: Value) -> Value:
        """Raises ProgramUnfit: how many rows an expert gets is known in mid-step only."""
        raise ProgramUnfit("how many rows an expert has is known only in the middle of a step")

    def attend(self, qkv: Value, by: Attention) -> Value:
        """Records the writing of keys and values, then attention over the pages."""
        layout, heads, index = self._layout, self._spec.num_heads, len(self._recorder.attends)
        if by.layer != index:
            raise ProgramUnfit(f"layer {by.layer} is the {index + 1}. to attend: its pages would be others'")
        value_bytes = layout.page_bytes // (2 * layout.num_layers)
        call = AttendCall(
            q_stride=qkv.width,
            k_stride=qkv.width,
            v_stride=qkv.width,
            page_bytes=layout.page_bytes,
            value_bytes=value_bytes,
            page_size=layout.page_size,
            heads=heads,
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            window=self._spec.layer_windows[by.layer],
            qk_dtype=DTYPES[torch.float32],
            v_dtype=DTYPES[torch.float32],
            out_dtype=DTYPES[self._dtype],
            scale=by.scale,
        )
        if by.q_norm is not None and by.k_norm is not None:
            query, key = (self._weights.norms[norm.weight.name] for norm in (by.q_norm, by.k_norm))
            if self._spec.qk_norm == "head":
                call.q_norm, call.k_norm, call.eps = query.weight.data_ptr(), key.weight.data_ptr(), by.q_norm.eps
            else:
                self._norm_all(qkv, query, key)
        out = self._recorder.value(heads * layout.head_dim, self._dtype.itemsize)
        self.ropes.append(by.rope)
        self._recorder.attends.append(call)
        self._recorder.attended.append((qkv, out))
        self._recorder.append(WRITE, qkv, out, attend=index)
        self._recorder.append(ATTEND, qkv, out, attend=index)
        return out

    def select(self, x: Value) -> Value:
        """Records the choice of the rows that are sampled."""
        self._require_wide(x)
        y = self._wide(x.width, is_selected=True)
        self._recorder.append(SELECT, x, y, n=x.width)
        return y

    def head(self, x: Value, by: Linear) -> Value:
        """See `Ops`. The logits are the step's own; what comes back is never read."""
        weight, x = self._weights.products[by.name], self._narrow(x)
        self._recorder.append(HEAD, x, x, **_product(weight))
        self._recorder.append(DRAW, x, x, n=weight.width)
        return x

    def _norm_all(self, qkv: Value, query: NativeNorm, key: NativeNorm) -> None:
        """All query heads together, and all key heads together, in place."""
        begin = 0
        for norm in (query, key):
            size = norm.weight.shape[0]
            self._recorder.append(NORM, qkv, qkv, n=size, k=begin, weight=norm.weight.data_ptr(), eps=norm.eps)
            begin += size

    def _wide(self, width: int, *, is_selected: bool = False) -> Value:
        return self._recorder.value(width, _FLOAT_BYTES, is_selected=is_selected)

    def _narrow(self, x: Value) -> Value:
        """As products read it."""
        if x.item_bytes == self._dtype.itemsize:
            return x
        y = self._recorder.value(x.width, self._dtype.itemsize, is_selected=x.is_selected)
        self._recorder.append(CONVERT, x, y, n=x.width)
        return y

    @staticmethod
    def _require_wide(x: Value) -> None:
        if x.item_bytes != _FLOAT_BYTES:
            raise ProgramUnfit("a norm of, or a choice from, rows that are already rounded")


def _product(weight: PackedWeight) -> dict[str, int | None]:
    return {"n": weight.width, "k": weight.depth, "weight": weight.at, "bias": weight.bias_at}
