"""How far the loading of a model is: counted in the thread that reads tensors, where it does, and told on the loop.

Needs no torch. The thread's context says whom to tell, so that nothing between engine and networks has to hand it on.
"""

from contextvars import ContextVar
from typing import Final

from nodes.model_spec import ModelSpec
from nodes.sizes import progress_text, size_text

_LAYERS: Final = "model.layers."


class LoadProgress:
    """Bytes and layers that are in memory. Written by one thread, read by another: each attribute is set at once."""

    def __init__(self) -> None:
        self._num_layers = 0
        self._total_bytes = 0
        self._done_bytes = 0
        self._layer = 0
        self.kernels_note = ""
        """Why the model is computed with slower kernels than there could be; empty: it is not."""

    def begin(self, spec: ModelSpec, total_bytes: int) -> None:
        """A model of so many bytes, in the dtype that it is computed in, is to be loaded; again, perhaps."""
        self._num_layers, self._layer, self._done_bytes, self._total_bytes = spec.num_layers, 0, 0, total_bytes

    def loaded(self, name: str, num_bytes: int) -> None:
        """A tensor is in memory."""
        self._done_bytes += num_bytes
        if name.startswith(_LAYERS):
            self._layer = int(name[len(_LAYERS) :].partition(".")[0])

    def __str__(self) -> str:
        """`loading 12/28 layers, 3.1 of 7.6 GB`; empty before the first tensor."""
        total = self._total_bytes
        if not self._done_bytes:
            return ""
        if self._done_bytes >= total:
            return f"loaded {self._num_layers}/{self._num_layers} layers, {size_text(total)}; getting ready to compute"
        return f"loading {self._layer}/{self._num_layers} layers, {progress_text(self._done_bytes, total)}"


current_load: ContextVar[LoadProgress | None] = ContextVar("current_load", default=None)
"""Of the model that this thread loads, if anybody wants to know."""
