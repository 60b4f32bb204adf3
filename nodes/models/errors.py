"""Why a model cannot be served.

    ModelError
      ModelNotFound        "model_not_found"      no such directory, preset or file in it
      ModelDamaged         "model_damaged"        files that contradict each other or themselves
      ModelUnsupported     "model_unsupported"    well-formed, but nothing here computes it
      TensorParallelUnfit  "tensor_parallel_unfit" it cannot be cut for so many ranks

None is retryable: each says what is wrong, why, and what to do.
"""

from typing import ClassVar


class ModelError(Exception):
    """Base of all reasons why a model cannot be served; `param` is the option that named the model."""

    code: ClassVar[str] = "model_error"
    retryable: ClassVar[bool] = False
    param: ClassVar[str | None] = "model"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ModelNotFound(ModelError):
    """There is no such model, or a file that it cannot do without is missing."""

    code = "model_not_found"


class ModelDamaged(ModelError):
    """A file cannot be read as what it should be, or files contradict each other."""

    code = "model_damaged"


class ModelUnsupported(ModelError):
    """The model is well-formed, but of a kind that the worker does not compute."""

    code = "model_unsupported"


class TensorParallelUnfit(ModelError):
    """Heads or columns of the model cannot be dealt out evenly to so many ranks."""

    code = "tensor_parallel_unfit"
    param = "tp"
