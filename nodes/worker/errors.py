"""Why a worker cannot start.

    WorkerError
      LayoutMismatch    "layout_mismatch"     the pool was made for another model, dtype or page size
      WeightsUnfit      "weights_unfit"       the weights on disk cannot be loaded as the model's configuration says
      BackendMissing    "backend_missing"     this model, dtype or device is not supported here
      DeviceUnfit       "device_unfit"        the device does not see the pool's memory as it should
      DeviceMemoryShort "device_memory_short" weights, activations and pool do not fit into the device's memory
      MemorySaverMissing "memory_saver_missing" weights should be releasable, but torch-memory-saver is missing
      GroupNotFormed    "group_not_formed"    the ranks of a tensor-parallel group did not find each other (retryable)

Only the last is retryable: the supervisor's restarts do not cure the others.

`CollectiveFailed` ("collective_failed") is why a worker of a group cannot go on: another rank is gone, hangs or
computes something else. No row is to blame, so no row is run again; the whole group is replaced.

`DeviceFailed` ("device_failed") is why a worker that could compute no longer can, whatever its input.
"""

from typing import ClassVar

from mesh.errors import TypedError


class WorkerError(TypedError, code="worker_error"):
    """Base of all reasons why a worker cannot start."""


class LayoutMismatch(WorkerError, code="layout_mismatch"):
    """The pool that the agent gave is not laid out for this model."""


class WeightsUnfit(WorkerError, code="weights_unfit"):
    """A weight file is missing, damaged, or holds other tensors than the configuration asks for."""


class BackendMissing(WorkerError, code="backend_missing"):
    """What the configuration asks for is not supported here."""


class DeviceUnfit(WorkerError, code="device_unfit"):
    """The device and the pool's memory on it do not fit together."""


class DeviceMemoryShort(WorkerError, code="device_memory_short"):
    """Weights, activations and pool do not fit into the device's memory."""


class MemorySaverMissing(WorkerError, code="memory_saver_missing"):
    """Weights cannot be placed in memory that can be released and taken back."""


class GroupNotFormed(WorkerError, code="group_not_formed", retryable=True):
    """The ranks of a group did not find each other in time. Another try, with a new unique id, may succeed."""


class CollectiveFailed(Exception):
    """A collective operation did not complete; the group computes nothing more."""

    code: ClassVar[str] = "collective_failed"


class DeviceFailed(Exception):
    """Nothing can be computed here any more; the worker ends, and its successor tries again."""

    code: ClassVar[str] = "device_failed"
