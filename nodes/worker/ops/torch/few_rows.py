"""Products of few rows with the norm before them and the activation after them, where a device has a kernel for it.

A norm is then not computed when the network asks for it, but by the product that follows, if there is one.
"""

from typing import Protocol

from torch import Tensor

from nodes.models.parts import Activation
from nodes.worker.ops.torch.hidden import Unnormed


class FewRows(Protocol):
    """Computes them. Bits of a row do not depend on how many rows are computed with it."""

    def takes(self, weight: Tensor, num_rows: int, activation: Activation | None = None) -> bool:
        """Whether `product` can be asked for so many rows, `[rows, in]` times `weight` `[out, in]`."""
        ...

    def takes_norm(self, num_rows: int, num_in: int) -> bool:
        """Whether it also norms so many rows of `num_in` numbers."""
        ...

    def product(
        self, x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        """`x @ weight.T + bias`, `[rows, out]`. What is pending of an `Unnormed`'s hidden states is added to them.

        With `activation`, the first half of `weight` is the gate, and the result `activation(gate) * up`,
        `[rows, out / 2]`.
        """
        ...
