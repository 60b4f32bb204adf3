"""Errors of the KV store, one tree; `code` and `retryable` cross the wire.

KVError
    OwnershipError          a page is not in the state that a move needs
    SequenceError           a sequence handle is misused
    PoolError
        PoolExhaustedMemory the segment does not fit the host's shared memory
            DeviceExhaustedMemory the pages do not fit the device's memory
        PoolMissing         no such segment
        PoolForeign         not a segment of ours
        PoolDenied          another user's file, or something that is no plain file, has the segment's name
        PoolTorn            a segment of ours with a damaged or unfinished header
        PoolMismatch        a sound segment of another layout, size, group or incarnation
        PoolReleased        the memory was released after the agent said where the pool is
        PoolBusy            another process owns the segment
        PoolClosed          used after `close`
        PagesElsewhere      the pages are not in the requested memory
        DeviceError
            DeviceUnavailable   no such device, no CUDA, or no CuPy
            DeviceHandleInvalid another process's device memory cannot be opened
            DeviceFault         CUDA failed; nothing on the device can be trusted any more
    TransferError           a transfer failed, or cannot begin; `code` says why
        PairUnmade          it never began, because two agents could not connect
    StoreError              a store of pages on disk cannot be opened
        StoreMissing        no such directory
        StoreDenied         another user's, open to other users, or not to be opened
        StoreReadOnly       its file system cannot be written
        StoreUnlockable     its file system has no locks
        StoreBusy           another process owns it
        StoreTooSmall       no page fits the given size
        StoreExhaustedSpace the disk has no room for it
        StoreForeign        not a store, or one of another version
        StoreUnmade         an installed store is not there, or cannot be made
"""

from mesh.errors import TypedError


class KVError(TypedError, code="kv_error"):
    """Base of everything that `kvstore` raises on purpose."""


class OwnershipError(KVError, code="page_ownership"):
    """Page `page` is not in the state that a move needs; nothing was changed."""

    def __init__(self, page: int, found: str, needed: str) -> None:
        super().__init__(f"page {page} is {found}, but this move needs it {needed}; its holder's bookkeeping is wrong")
        self.page = page
        self.found = found
        self.needed = needed


class SequenceError(KVError, code="sequence_pages"):
    """A sequence's pages are used out of order: advanced past what is reserved, or used after release."""


class PoolError(KVError, code="pool"):
    """A pool's memory cannot be made or mapped."""


class PoolExhaustedMemory(PoolError, code="pool_no_space"):
    """The segment does not fit; the message says how many bytes it needs and how many are available."""

    def __init__(self, path: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"{path} needs {needed_bytes} bytes of shared memory, but {available_bytes} are available: "
            "give the pool fewer pages, or enlarge the file system (docker: --shm-size; "
            "mount -o remount,size=… /dev/shm)"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class DeviceExhaustedMemory(PoolExhaustedMemory, code="device_no_space"):
    """The pages do not fit the device; the message says how many bytes they take, how many are free, and the total."""

    def __init__(self, device: str, needed_bytes: int, available_bytes: int, total_bytes: int) -> None:
        PoolError.__init__(
            self,
            f"{device} has {available_bytes} of its {total_bytes} bytes free, but the pool's pages take "
            f"{needed_bytes}: give the pool fewer pages, or stop what else uses the device (nvidia-smi lists it)",
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class PoolMissing(PoolError, code="pool_missing", retryable=True):
    """There is no segment at this path: its agent has not made it, or has removed it."""


class PoolForeign(PoolError, code="pool_foreign"):
    """The file is not a KV pool, or has a format that this version does not read."""


class PoolDenied(PoolError, code="pool_denied"):
    """Another user's file, or something that is no plain file, has the segment's name: neither used nor removed."""


class PoolTorn(PoolError, code="pool_torn"):
    """The header is damaged, or the file is shorter than its header says."""


class PoolMismatch(PoolError, code="pool_mismatch"):
    """A sound pool, but not the requested one."""


class PoolReleased(PoolMismatch, code="pool_released", retryable=True):
    """The pool was released after its agent said where it is; asked again, the agent says so until it is resumed."""


class PoolBusy(PoolError, code="pool_busy"):
    """Another living process owns the segment."""


class PoolClosed(PoolError, code="pool_closed"):
    """The pool's memory was used after `close`."""


class PagesElsewhere(PoolError, code="pages_elsewhere"):
    """The pages are not in the requested memory, or not mapped by this process."""


class DeviceError(PoolError, code="device"):
    """A device's memory cannot be allocated or used."""


class DeviceUnavailable(DeviceError, code="device_unavailable"):
    """There is no such device here, no CUDA driver, or no CuPy."""


class DeviceHandleInvalid(DeviceError, code="device_handle", retryable=True):
    """The handle of another process's device memory cannot be opened: that process is gone, or out of reach."""


class DeviceFault(DeviceError, code="device_fault"):
    """A CUDA call failed for a reason that the caller could not have known; the process should be replaced."""


class TransferError(KVError):
    """A transfer failed or was refused; `code` is what `TransferFailed` carries."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransportUnusable(TransferError):
    """A configured transport is not installed, cannot be made, or does not move pages of this kind."""

    def __init__(self, message: str) -> None:
        super().__init__("transport_unusable", message)


class PairUnmade(TransferError):
    """Two agents could not connect over a transport; nothing was moved, and another transport may be tried."""


class StoreError(KVError, code="store"):
    """A store of pages on disk cannot be opened."""


class StoreMissing(StoreError, code="store_missing"):
    """The directory does not exist, or is none: it is not made, since it may be where a disk has yet to be mounted."""


class StoreDenied(StoreError, code="store_denied"):
    """The directory or a file in it belongs to another user, can be changed by others, or cannot be opened."""


class StoreReadOnly(StoreError, code="store_read_only"):
    """The file system is mounted read-only."""


class StoreUnlockable(StoreError, code="store_no_locks"):
    """The file system has no locks (some network file systems), so two agents could write the same pages."""


class StoreBusy(StoreError, code="store_busy"):
    """Another living process owns the store."""


class StoreTooSmall(StoreError, code="store_too_small"):
    """Not one page fits; the message says how many bytes one takes."""


class StoreExhaustedSpace(StoreError, code="store_no_space"):
    """The disk cannot hold the store; the message says how many bytes are missing, and what else lies there."""


class StoreForeign(StoreError, code="store_foreign"):
    """The files are not a store's, are damaged, or have a format that this version does not read."""


class StoreKeyUnusable(StoreError, code="store_key"):
    """The file with the key of values cannot be read, is others' to read, or has no key."""


class StoreUnmade(StoreError, code="store_unmade"):
    """A store that another package installs is not there, cannot be made, or was not made in time."""
