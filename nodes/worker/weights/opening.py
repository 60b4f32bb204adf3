"""The weights of a model, wherever they come from, counted as they are read."""

import torch
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.registry import model_of
from nodes.models.tensor_parallel import Part
from nodes.worker.pool.device_memory import parameter_bytes
from nodes.worker.weights.load_progress import LoadProgress, current_load
from nodes.worker.weights.loader import SafetensorsWeights, WeightSource
from nodes.worker.weights.random_weights import RandomWeights


def open_weights(spec: ModelSpec, dtype: torch.dtype, tp_size: int = 1) -> WeightSource:
    """Weights in `dtype` for one of `tp_size` ranks. Raises WeightsUnfit."""
    source = RandomWeights(spec, dtype) if spec.source == "random" else SafetensorsWeights(spec, dtype)
    progress = current_load.get()
    if progress is None:
        return source
    return CountedWeights(source, progress, spec, parameter_bytes(spec, str(dtype).removeprefix("torch."), tp_size))


class CountedWeights:
    """A `WeightSource` that counts what is read from another; the embedding, always read first, restarts the count."""

    def __init__(self, source: WeightSource, progress: LoadProgress, spec: ModelSpec, total_bytes: int) -> None:
        self._source = source
        self._progress = progress
        self._spec = spec
        self._total_bytes = total_bytes
        self._first = model_of(spec).embedding.weight.name

    def tensor(self, name: str) -> Tensor:
        """One tensor, in its expected shape; raises WeightsUnfit as the source does."""
        return self._counted(name, self._source.tensor(name))

    def part(self, name: str, part: Part) -> Tensor:
        """A rank's part of one tensor, zeros beyond its end; raises WeightsUnfit. Counts the part's bytes only."""
        return self._counted(name, self._source.part(name, part))

    def _counted(self, name: str, tensor: Tensor) -> Tensor:
        if name == self._first:
            self._progress.begin(self._spec, self._total_bytes)
        self._progress.loaded(name, tensor.nbytes)
        return tensor
