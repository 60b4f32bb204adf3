"""Errors of the KV store, one tree; `code` and `retryable` are what crosses the wire.

KVError
    OwnershipError          a page is not in the state that a move needs
    SequenceError           a sequence handle is used against its own rules
    PoolError
        PoolExhaustedMemory the segment does not fit the host's shared memory
            DeviceExhaustedMemory the pages do not fit the device's memory
        PoolMissing         no such segment
        PoolForeign         not a segment of ours
        PoolDenied          something of another user's, or no plain file, has the segment's name
        PoolTorn            a segment of ours with a damaged or unfinished header
        PoolMismatch        a sound segment of another layout, size, group or incarnation
        PoolReleased        its agent has taken the memory back since it said where the pool is
        PoolBusy            another process owns the segment
        PoolClosed          used after `close`
        PagesElsewhere      the pages are not in the memory that was asked for
        DeviceError
            DeviceUnavailable   no such device, no CUDA, or no CuPy
            DeviceHandleInvalid another process's device memory cannot be opened
            DeviceFault         CUDA failed; nothing on the device can be trusted any more
    TransferError           a transfer ended, or cannot begin; `code` says why
        PairUnmade          it never began, because two agents could not meet
"""

from mesh.errors import TypedError


class KVError(TypedError, code="kv_error"):
    """Base of everything that `kvstore` raises on purpose."""


class OwnershipError(KVError, code="page_ownership"):
    """A move needs page `page` in another state than it is in; nothing was changed."""

    def __init__(self, page: int, found: str, needed: str) -> None:
        super().__init__(f"page {page} is {found}, this move needs it {needed}; its holder's book is wrong")
        self.page = page
        self.found = found
        self.needed = needed


class SequenceError(KVError, code="sequence_pages"):
    """A sequence's pages are used out of order: advanced past what is reserved, or used after release."""


class PoolError(KVError, code="pool"):
    """A pool's memory cannot be made or mapped."""


class PoolExhaustedMemory(PoolError, code="pool_no_space"):
    """The segment does not fit; says how many bytes it needs and how many there are."""

    def __init__(self, path: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"{path} needs {needed_bytes} bytes of shared memory and {available_bytes} are available: "
            "give the pool fewer pages, or enlarge the file system (docker: --shm-size; "
            "mount -o remount,size=… /dev/shm)"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class DeviceExhaustedMemory(PoolExhaustedMemory, code="device_no_space"):
    """The pages do not fit the device; says how many bytes were asked for, how many are free, and of how many."""

    def __init__(self, device: str, needed_bytes: int, available_bytes: int, total_bytes: int) -> None:
        PoolError.__init__(
            self,
            f"{device} has {available_bytes} of its {total_bytes} bytes free and the pool's pages take {needed_bytes}: "
            "give the pool fewer pages, or end what else uses the device (nvidia-smi lists it)",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class PoolMissing(PoolError, code="pool_missing", retryable=True):
    """There is no segment at this path; its agent has not made it, or took it down."""


class PoolForeign(PoolError, code="pool_foreign"):
    """The file is not a KV pool, or one of a format that this version does not read."""


class PoolDenied(PoolError, code="pool_denied"):
    """What has the segment's name is another user's, or no plain file: it is neither used nor removed."""


class PoolTorn(PoolError, code="pool_torn"):
    """The header is damaged, or the file is shorter than its header says."""


class PoolMismatch(PoolError, code="pool_mismatch"):
    """A sound pool, but not the one that was asked for."""


class PoolReleased(PoolMismatch, code="pool_released", retryable=True):
    """Its memory was wanted back since its agent said where it is; asked again, that says so until it is resumed."""


class PoolBusy(PoolError, code="pool_busy"):
    """Another living process owns the segment."""


class PoolClosed(PoolError, code="pool_closed"):
    """The pool's memory was used after `close`."""


class PagesElsewhere(PoolError, code="pages_elsewhere"):
    """The pages lie in another memory than the one asked for, or are not mapped by this process."""


class DeviceError(PoolError, code="device"):
    """A device's memory cannot be had or used."""


class DeviceUnavailable(DeviceError, code="device_unavailable"):
    """There is no such device here, no CUDA driver, or no CuPy."""


class DeviceHandleInvalid(DeviceError, code="device_handle", retryable=True):
    """The handle of another process's device memory cannot be opened: its maker is gone, or it is out of reach."""


class DeviceFault(DeviceError, code="device_fault"):
    """A CUDA call failed for no reason that the caller could have known; the process should be replaced."""


class TransferError(KVError):
    """A transfer failed or was refused; `code` is what `TransferFailed` carries."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransportUnusable(TransferError):
    """A transport that the configuration names is not installed, cannot be made, or does not move such pages."""

    def __init__(self, message: str) -> None:
        super().__init__("transport_unusable", message)


class PairUnmade(TransferError):
    """Two agents did not come together over a transport; nothing was moved, and another transport may be tried."""
