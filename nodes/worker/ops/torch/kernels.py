"""The element-wise half of the network behind one protocol, and its plain torch form, the oracle of all others."""

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from nodes.model_spec import ModelSpec, RopeParameters
from nodes.models.parts import Activation
from nodes.worker.ops.torch.rotary import inverse_frequencies


class Kernels(Protocol):
    """Norms, rotary embedding and activation, on rows of any device; arguments are overwritten only as documented."""

    has_wide_norms: bool
    """Whether weights of norms are taken in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` for `x` of shape `[rows, size]`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """`residual += x`, then `x = residual / rms(residual) * weight`; both `[rows, size]`, both overwritten."""
        ...

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm of each head of `[rows, heads, head_dim]`, overwritten; rows may be strided."""
        ...

    def rotate(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        """Rotary embedding of `[rows, heads, head_dim]`, overwritten; rows may be strided.

        `positions` is int32 `[rows]`, `cos_sin` comes from `cos_sin_table`.
        """
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` for `[rows, 2 * size]`, gate first: `[rows, size]`."""
        ...


class TorchKernels(Kernels):
    """In plain torch: computed in float32, rounded once."""

    has_wide_norms = True

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x.float(), [x.shape[-1]], weight.float(), eps).to(x.dtype)

    @override
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        residual.add_(x)
        x.copy_(self.rms_norm(residual, weight, eps))

    @override
    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        heads.copy_(self.rms_norm(heads, weight, eps))

    @override
    def rotate(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
        for heads in (q, k):
            first, second = heads.float().chunk(2, -1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))

    @override
    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return _activated(gate, activation).mul_(up).to(gate_up.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`(x - mean) / deviation * weight + bias` for `x` of shape `[rows, size]`; the others are float32."""
    return torch.layer_norm(x.float(), [x.shape[-1]], weight, bias, eps).to(x.dtype)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """`activation(x)`, computed in float32."""
    wide = x.float()
    return (wide.relu() if activation == "relu" else _activated(wide, activation)).to(x.dtype)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu_erf":
        return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))
    # F.silu and F.gelu round the last few elements of a call differently: they go through scalar code on the CPU.
    # The latter is `x / 2 * (1 + tanh(u / 2))`, which is `x * sigmoid(u)`.
    u = x if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-u))


def cos_sin_table(spec: ModelSpec, rope: RopeParameters, device: torch.device) -> Tensor:
    """Float32 `[context_length, head_dim]`: the cosines of a position's angles, then their sines.

    The layout of vLLM and FlashInfer. Complete from the start, because a captured graph keeps its address.
    """
    positions = torch.arange(spec.context_length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, spec.head_dim))
    return (torch.cat((angles.cos(), angles.sin()), -1) * rope.attention_factor).to(device)
