"""Hidden states between kernels: what is still to be added to them, and norms that a product may compute itself."""

from torch import Tensor

from nodes.worker.ops.torch.kernels import Kernels


class Hidden:
    """Hidden states: `rows`, to which `pending` is still to be added. The next norm does that in its own kernel."""

    __slots__ = ("pending", "rows")

    def __init__(self, rows: Tensor, pending: Tensor | None = None) -> None:
        self.rows = rows
        self.pending = pending


class Unnormed:
    """An RMS norm of `hidden` that is left to what takes it: `weight` is `[size]`.

    Taken at most once by a product that norms; `normed` may be asked for any number of times.
    """

    __slots__ = ("_kernels", "_normed", "eps", "hidden", "weight")

    def __init__(self, hidden: Hidden, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self.hidden, self.weight, self.eps = hidden, weight, eps
        self._kernels = kernels
        self._normed: Tensor | None = None

    def normed(self) -> Tensor:
        """The norm by a kernel of its own, after what is pending has been added."""
        if self._normed is None:
            hidden = self.hidden
            if hidden.pending is None:
                self._normed = self._kernels.rms_norm(hidden.rows, self.weight, self.eps)
            else:
                # The kernel overwrites both: what was pending becomes the norm, the rows their sum.
                self._normed, hidden.pending = hidden.pending, None
                self._kernels.add_rms_norm(self._normed, hidden.rows, self.weight, self.eps)
        return self._normed


Value = Tensor | Hidden | Unnormed
"""What the network's operations take and give."""
