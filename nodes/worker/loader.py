"""Where a model's tensors come from: safetensors files, mapped, never unpickled.

Called by the models while they are built. A tensor is converted to the compute dtype when it is asked for and fused or
packed at once, so that no more than the packed weights stay in memory; pages of the files can be dropped by the system.
"""

from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.model_spec.weight_index import expected_shapes
from nodes.worker.errors import WeightsUnfit


class WeightSource(Protocol):
    """Tensors by the names of `expected_shapes`, each in the compute dtype and its expected shape."""

    def tensor(self, name: str) -> Tensor:
        """One tensor; raises WeightsUnfit if it is missing, damaged or of another shape."""
        ...


class SafetensorsWeights:
    """The weights of a model directory."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._shapes = expected_shapes(spec)
        self._files: dict[str, safe_open] = {}
        for path in spec.weight_files:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsUnfit(
                    f"{path} cannot be opened as safetensors: {error}. Download the model again."
                ) from error
            self._files |= dict.fromkeys(cast("list[str]", file.keys()), file)
        self._directory = str(Path(spec.weight_files[0]).parent)

    def tensor(self, name: str) -> Tensor:
        """See `WeightSource`."""
        if name not in self._files:
            raise WeightsUnfit(
                f"{self._directory} has no tensor {name!r}, which its config.json asks for. Download the model again."
            )
        try:
            tensor = cast("Tensor", self._files[name].get_tensor(name))
        except SafetensorError as error:
            raise WeightsUnfit(f"{name!r} in {self._directory} cannot be read: {error}. Download it again.") from error
        if tuple(tensor.shape) != self._shapes[name]:
            raise WeightsUnfit(
                f"{name!r} in {self._directory} has shape {list(tensor.shape)}, config.json asks for"
                f" {list(self._shapes[name])}. Weights and config.json are of different models."
            )
        return tensor.to(self._dtype)
