"""The gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

from torch import Tensor

from nodes.worker.layers.linear import Linear


class GatedMLP:
    """Three products. SiLU, gating and the residual are done inside the kernels that make their operands.

    Gate and up are two calls rather than one of both widths: fusing the activation saves more than the call costs.
    """

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self._gate = gate
        self._up = up
        self._down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual` plus the layer's output for `x`, both `[rows, hidden]`."""
        return self._down.plus(self._up.times(x, self._gate.silu(x)), residual)
