"""Why a model cannot be served.

    ModelError
      ModelNotFound        "model_not_found"      no such directory, preset or file in it
      ModelDamaged         "model_damaged"        files that contradict each other or themselves
      ModelUnsupported     "model_unsupported"    well-formed, but nothing here computes it
      TensorParallelUnfit  "tensor_parallel_unfit" it cannot be cut for so many ranks

None is retryable: each says what is wrong, why, and what to do.
"""

from mesh.errors import TypedError


class ModelError(TypedError, code="model_error", param="model"):
    """Base of all reasons why a model cannot be served; `param` is the option that named the model."""


class ModelNotFound(ModelError, code="model_not_found"):
    """There is no such model, or a file that it cannot do without is missing."""


class ModelDamaged(ModelError, code="model_damaged"):
    """A file cannot be read as what it should be, or files contradict each other."""


class ModelUnsupported(ModelError, code="model_unsupported"):
    """The model is well-formed, but of a kind that the worker does not compute."""


class TensorParallelUnfit(ModelError, code="tensor_parallel_unfit", param="tp"):
    """Heads or columns of the model cannot be dealt out evenly to so many ranks."""
