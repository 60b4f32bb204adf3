"""Where a model's tensors come from: safetensors files, mapped, never unpickled.

Called by the models while they are built. A tensor is converted to the compute dtype when it is requested and fused,
packed or copied at once, so that only that stays in memory; the system can drop pages of the files. A tensor that was
kept as it lies in its file would change with the file, under a fingerprint that says what it was.
"""

from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from nodes.model_spec import ModelSpec
from nodes.model_spec.tensor_names import stored_names
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.tensor_parallel import Part
from nodes.worker.errors import WeightsUnfit


class WeightSource(Protocol):
    """A model's tensors by their names, each in the compute dtype and its expected shape."""

    def tensor(self, name: str) -> Tensor:
        """One tensor; raises WeightsUnfit if it is missing, damaged or of another shape."""
        ...

    def part(self, name: str, part: Part) -> Tensor:
        """A part of one tensor, with zeros for what lies beyond its end; raises as `tensor` does.

        Only the part is read from the file.
        """
        ...


class SafetensorsWeights(WeightSource):
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
        self._names = stored_names(self._shapes, self._files)
        self._directory = str(Path(spec.weight_files[0]).parent)

    @override
    def tensor(self, name: str) -> Tensor:
        return self._checked(name, self._read(name, None)).to(self._dtype)

    @override
    def part(self, name: str, part: Part) -> Tensor:
        return padded_part(self._checked(name, self._read(name, part)), part).to(self._dtype)

    def _read(self, name: str, part: Part | None) -> Tensor:
        stored = self._names.get(name, name)
        if stored not in self._files:
            raise WeightsUnfit(
                f"{self._directory} has no tensor {stored!r}, which its config.json asks for. Download the model again."
            )
        file = self._files[stored]
        try:
            if part is None:
                whole = cast("Tensor", file.get_tensor(stored))
                self._check_shape(name, tuple(whole.shape))
                return whole
            found = cast("Any", file.get_slice(stored))
            shape = self._check_shape(name, tuple(cast("list[int]", found.get_shape())))
            begin, end = (min(index, shape[part.dim]) for index in (part.begin, part.end))
            return cast("Tensor", found[begin:end] if part.dim == 0 else found[:, begin:end])
        except SafetensorError as error:
            raise WeightsUnfit(f"{name!r} in {self._directory} cannot be read: {error}. Download it again.") from error

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        # One pass at memory speed; a second one looks closer only if something is wrong, or the sum overflows.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise WeightsUnfit(
                f"{name!r} in {self._directory} has numbers that are not finite: nothing could be computed with it."
                " Download the model again."
            )
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape != self._shapes[name]:
            raise WeightsUnfit(
                f"{name!r} in {self._directory} has shape {list(shape)}, config.json asks for"
                f" {list(self._shapes[name])}. Weights and config.json belong to different models."
            )
        return shape


def padded_part(found: Tensor, part: Part) -> Tensor:
    """`found` padded with zeros to the part's length; only in dimension 0, other parts are returned unchanged."""
    missing = part.end - part.begin - found.shape[part.dim]
    return torch.cat((found, found.new_zeros(missing, *found.shape[1:]))) if missing and part.dim == 0 else found
