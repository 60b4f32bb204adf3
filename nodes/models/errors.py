"""Why a model cannot be served.

    ModelError
      ModelNotFound        "model_not_found"      no such directory, preset or file in it
      ModelDamaged         "model_damaged"        files that contradict each other or themselves
      ModelUnsupported     "model_unsupported"    well-formed, but not supported here
      WeightsChanged       "weights_changed"      files that were changed while they were read
      TensorParallelUnfit  "tensor_parallel_unfit" it cannot be cut for that many ranks

None is retryable: each says what is wrong, why, and what to do.
"""

from mesh.errors import TypedError


class ModelError(TypedError, code="model_error", param="model"):
    """Base of all reasons why a model cannot be served; `param` is the option that named the model."""


class ModelNotFound(ModelError, code="model_not_found"):
    """There is no such model, or a required file is missing."""


class ModelDamaged(ModelError, code="model_damaged"):
    """A file is malformed, or files contradict each other."""


class ModelUnsupported(ModelError, code="model_unsupported"):
    """The model is well-formed, but of a kind that the worker does not support."""


class WeightsChanged(ModelError, code="weights_changed"):
    """Files of weights were changed while they were read."""


class TensorParallelUnfit(ModelError, code="tensor_parallel_unfit", param="tp"):
    """The model cannot be cut for that many ranks, for example because its heads do not divide evenly."""
