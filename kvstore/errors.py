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

from typing import ClassVar


class KVError(Exception):
    """Base of everything that `kvstore` raises on purpose."""

    code: str = "kv_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class OwnershipError(KVError):
    """A move needs page `page` in another state than it is in; nothing was changed."""

    code = "page_ownership"

    def __init__(self, page: int, found: str, needed: str) -> None:
        super().__init__(f"page {page} is {found}, this move needs it {needed}; its holder's book is wrong")
        self.page = page
        self.found = found
        self.needed = needed


class SequenceError(KVError):
    """A sequence's pages are used out of order: advanced past what is reserved, or used after release."""

    code = "sequence_pages"


class PoolError(KVError):
    """A pool's memory cannot be made or mapped."""

    code = "pool"


class PoolExhaustedMemory(PoolError):
    """The segment does not fit; says how many bytes it needs and how many there are."""

    code = "pool_no_space"

    def __init__(self, path: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"{path} needs {needed_bytes} bytes of shared memory and {available_bytes} are available: "
            "give the pool fewer pages, or enlarge the file system (docker: --shm-size; "
            "mount -o remount,size=… /dev/shm)"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class DeviceExhaustedMemory(PoolExhaustedMemory):
    """The pages do not fit the device; says how many bytes were asked for, how many are free, and of how many."""

    code = "device_no_space"

    def __init__(self, device: str, needed_bytes: int, available_bytes: int, total_bytes: int) -> None:
        PoolError.__init__(
            self,
            f"{device} has {available_bytes} of its {total_bytes} bytes free and the pool's pages take {needed_bytes}: "
            "give the pool fewer pages, or end what else uses the device (nvidia-smi lists it)",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class PoolMissing(PoolError):
    """There is no segment at this path; its agent has not made it, or took it down."""

    code = "pool_missing"
    retryable: ClassVar[bool] = True


class PoolForeign(PoolError):
    """The file is not a KV pool, or one of a format that this version does not read."""

    code = "pool_foreign"


class PoolDenied(PoolError):
    """What has the segment's name is another user's, or no plain file: it is neither used nor removed."""

    code = "pool_denied"


class PoolTorn(PoolError):
    """The header is damaged, or the file is shorter than its header says."""

    code = "pool_torn"


class PoolMismatch(PoolError):
    """A sound pool, but not the one that was asked for."""

    code = "pool_mismatch"


class PoolBusy(PoolError):
    """Another living process owns the segment."""

    code = "pool_busy"


class PoolClosed(PoolError):
    """The pool's memory was used after `close`."""

    code = "pool_closed"


class PagesElsewhere(PoolError):
    """The pages lie in another memory than the one asked for, or are not mapped by this process."""

    code = "pages_elsewhere"


class DeviceError(PoolError):
    """A device's memory cannot be had or used."""

    code = "device"


class DeviceUnavailable(DeviceError):
    """There is no such device here, no CUDA driver, or no CuPy."""

    code = "device_unavailable"


class DeviceHandleInvalid(DeviceError):
    """The handle of another process's device memory cannot be opened: its maker is gone, or it is out of reach."""

    code = "device_handle"
    retryable: ClassVar[bool] = True


class DeviceFault(DeviceError):
    """A CUDA call failed for no reason that the caller could have known; the process should be replaced."""

    code = "device_fault"


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
