"""Where a store lies, whose pages it holds, and how many fit. Without numpy: `meshctl up` looks before anything starts.

Used by `directory.py`, which opens stores, and by the command line, which says early what could not be opened.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstore.errors import StoreDenied, StoreMissing, StoreTooSmall

MAGIC: Final = b"KVMESHST"
FORMAT_VERSION: Final = 1
HEAD_BYTES: Final = 64
"""One cache line; a sector of 512 bytes holds eight, so most disks write a head whole or not at all."""
HEADER_BYTES: Final = 4096
"""One block of the disk, so that the header is written whole; its names take some 150 bytes."""
ALIGNMENT: Final = 4096
"""What direct I/O asks of memory, offsets and lengths: the largest block of today's disks, a page of memory too."""
MAX_SLOTS: Final = 2**32 - 2
"""Slot numbers have 32 bits, and the last of them means none."""
FOLDER: Final = "kv-"
HEADS: Final = "heads"
PAGES: Final = "pages"


class StoreIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose pages a store holds: equal identities mean that a page's hash means the same bytes.

    `page_bytes` are those of one page at one rank, `layout_digest` is `KVLayout.digest`, `numerics` the fingerprint of
    what computes (torch, instruction set, kernels).
    """

    host: str
    layout_digest: bytes
    page_bytes: int
    tp_size: int = 1
    numerics: str = ""

    @property
    def folder(self) -> str:
        packed = msgspec.msgpack.encode(msgspec.structs.astuple(self))
        return FOLDER + hashlib.blake2b(packed, digest_size=16).hexdigest()

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.page_bytes, self.tp_size)

    def num_slots(self, size_bytes: int) -> int:
        """Pages that a store of so many bytes holds. Raises StoreTooSmall if that is none."""
        one = self.slot_bytes + HEAD_BYTES
        num_slots = min((size_bytes - HEADER_BYTES - self.slot_bytes) // one, MAX_SLOTS)
        if num_slots < 1:
            raise StoreTooSmall(
                f"a store of {size_bytes} bytes holds no page: it needs {HEADER_BYTES + self.slot_bytes} bytes and "
                f"{one} for each page; give it more (--kv-disk-size)"
            )
        return num_slots

    def file_bytes(self, num_slots: int) -> int:
        """What the files of a store take. One slot more than it has: there it is tried out how they can be written."""
        return HEADER_BYTES + num_slots * HEAD_BYTES + (num_slots + 1) * self.slot_bytes


class StoreFound(NamedTuple):
    """A store that lies in a directory; `identity` is None if its header cannot be read.

    `written_at` is the Unix time at which a head was written last.
    """

    path: Path
    identity: StoreIdentity | None
    num_bytes: int
    written_at: float


def slot_bytes_of(page_bytes: int, tp_size: int) -> int:
    """Bytes of a slot for a page of `page_bytes` at each rank."""
    return -(-page_bytes * tp_size // ALIGNMENT) * ALIGNMENT


def find_stores(directory: str | Path) -> list[StoreFound]:
    """Every store in a directory, whosever pages it holds. Raises OSError if it cannot be read."""
    found: list[StoreFound] = []
    for folder in sorted(Path(directory).glob(f"{FOLDER}*")):
        try:
            with (folder / HEADS).open("rb") as file:
                identity = decode_header(file.read(HEADER_BYTES))
            files = [(folder / name).stat() for name in (HEADS, PAGES)]
        except OSError:
            # Being made, or another user's: not ours to speak of.
            continue
        num_bytes = sum(status.st_blocks * 512 for status in files)
        found.append(StoreFound(folder, identity, num_bytes, files[0].st_mtime))
    return found


def require_own(path: Path, *, is_ours: bool) -> None:
    """Nobody else may be able to change `path`; `is_ours`: we made it. Raises StoreMissing, StoreDenied."""
    try:
        status = path.stat() if not is_ours else path.lstat()
    except OSError as error:
        raise StoreMissing(
            f"{path} cannot be used for KV pages ({error.strerror}): make this directory first"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise StoreMissing(f"{path} is no directory ({stat.filemode(status.st_mode)}): name one for KV pages")
    # Who owns a directory, or may write one without the sticky bit, can put another folder in the place of ours.
    owners = {os.geteuid()} if is_ours else {os.geteuid(), 0}
    is_open = status.st_mode & 0o077 if is_ours else status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in owners or is_open:
        raise StoreDenied(
            f"{path} is {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}, so others could read or "
            f"replace KV pages in it: name a directory of user {os.geteuid()} that nobody else can write"
        )


def require_private(path: Path, status: os.stat_result) -> None:
    """`path`, of that status, is a file of ours alone. Raises StoreDenied."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StoreDenied(
            f"{path} is {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}: it must be a plain file "
            "that only this user can open; remove it"
        )


def encode_header(identity: StoreIdentity) -> bytes:
    """The first bytes of `heads`; longer than HEADER_BYTES if its names are too long."""
    body = msgspec.msgpack.encode(identity)
    header = MAGIC + FORMAT_VERSION.to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
    return header.ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> StoreIdentity | None:
    prefix = len(MAGIC) + 8
    length = int.from_bytes(data[prefix - 4 : prefix], "little")
    try:
        identity = msgspec.msgpack.decode(data[prefix : prefix + length], type=StoreIdentity)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return identity if encode_header(identity) == data else None
