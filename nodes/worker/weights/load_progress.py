"""Progress of loading a model: counted where tensors are read, in that thread, and reported on the event loop.

Needs no torch. A context variable names the load in progress, so that nothing between engine and networks has to pass
it on.
"""

import re
from contextvars import ContextVar
from typing import Final

from nodes.model_spec import ModelSpec
from nodes.sizes import progress_text, size_text

_LAYER: Final = re.compile(r"\w+\.(?:layers|encoder\.layer)\.(\d+)\.")


class LoadProgress:
    """Bytes and layers in memory. Written by one thread and read by another; each attribute is set atomically."""

    def __init__(self) -> None:
        self._num_layers = 0
        self._total_bytes = 0
        self._done_bytes = 0
        self._layer = 0
        self.kernels_note = ""
        """Why slower kernels are in use than there could be; empty: they are not."""

    def begin(self, spec: ModelSpec, total_bytes: int) -> None:
        """Loading begins, perhaps again, of a model of `total_bytes` in its compute dtype."""
        self._num_layers, self._layer, self._done_bytes, self._total_bytes = spec.num_layers, 0, 0, total_bytes

    def loaded(self, name: str, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if found := _LAYER.match(name):
            self._layer = int(found[1])

    def __str__(self) -> str:
        """`loading 12/28 layers, 3.1 of 7.6 GB`; empty before the first tensor."""
        total = self._total_bytes
        if not self._done_bytes:
            return ""
        if self._done_bytes >= total:
            return f"loaded {self._num_layers}/{self._num_layers} layers, {size_text(total)}; getting ready to compute"
        return f"loading {self._layer}/{self._num_layers} layers, {progress_text(self._done_bytes, total)}"


current_load: ContextVar[LoadProgress | None] = ContextVar("current_load", default=None)
"""Progress of the model that this thread loads; None: nobody follows it."""
