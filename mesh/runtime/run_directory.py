"""The run directory of one mesh on one host: its sockets, its identity, and where the live registry is.

    <base>/kvmesh-<uid>/<mesh name>/        0700
        host.json                           where actors of this host listen on tcp; absent on a mesh of one host
        s/<actor id>.<epoch>.c|.d           ipc sockets, control and data channel
        registry.json                       address and endpoint of the registry, which keeps it correct

Used by `mesh/run.py`, the registry actor and `cli`.
"""

import contextlib
import errno
import hmac
import os
import socket
import stat
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mesh.address import HOST_NAME, Address, Endpoint
from mesh.errors import BindError
from mesh.membership.proof import REGISTRY, HostSecret
from mesh.transport.base import Channel

MAX_SOCKET_PATH_BYTES: Final = 100
"""A little less than Linux accepts (108), so that every system does."""

NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding a damaged file raises: bytes that are not UTF-8 raise a ValueError."""

_MAX_FILE_BYTES: Final = 1 << 24
"""The files here have less than 1 KB, a manifest of 1,000 processes 100 KB; a huge one must not take all memory."""


class HostRecord(msgspec.Struct, frozen=True):
    """One host of a mesh of several: its actors listen on `bind`, and actors of other hosts dial `address`.

    `bind` is an IP address of the host (`0.0.0.0` and `::`: all of them), `address` an IP address or a name.
    `insecure`: tcp beyond loopback is wanted although nothing on it is encrypted or authenticated. `keys` is the
    directory of the host's keys (`mesh/runtime/key_files.py`); "": tcp is plain. `spec` is what the host takes the mesh
    to be (`mesh/membership/spec.py`); its actors send it when they join. `ports`, first and last, is the range to
    listen on if that matters, for example to a firewall.
    """

    name: Annotated[str, msgspec.Meta(pattern=HOST_NAME)]
    bind: str
    address: str
    insecure: bool = False
    keys: str = ""
    spec: dict[str, str] = {}
    ports: tuple[int, int] | None = None


class _RegistryFile(msgspec.Struct, frozen=True):
    actor_id: str
    epoch: int
    control: str
    data: str
    local_control: str = ""
    local_data: str = ""
    proof: str = ""


class RunDirectory:
    """Paths of one mesh. Nothing is touched before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sockets = path / "s"
        self.registry_file = path / "registry.json"
        self.host_file = path / "host.json"

    @classmethod
    def of_mesh(cls, name: str) -> "RunDirectory":
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
        return cls(base / f"kvmesh-{os.getuid()}" / name)

    @property
    def mesh(self) -> str:
        return self.path.name

    def create(self) -> None:
        """Make the directories; raises `BindError` if another user owns or can access them."""
        # One by one: `mkdir` does not apply our mode to the parents that it makes.
        for path in (self.path.parent, self.path, self.sockets):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            mine = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if not mine and (path != self.path.parent or status.st_uid not in (0, os.getuid())):
                raise BindError(
                    f"{path} is open to other users: remove it, or set XDG_RUNTIME_DIR to a directory of your own"
                )

    def socket(self, address: Address, channel: Channel) -> Path:
        """The socket of one channel of one incarnation; raises `BindError` if its path is too long for a socket."""
        path = self._path(address, channel)
        if len(os.fsencode(path)) >= MAX_SOCKET_PATH_BYTES:
            raise BindError(
                f"{path} is too long for a socket (at most {MAX_SOCKET_PATH_BYTES - 1} bytes): "
                "set XDG_RUNTIME_DIR to a shorter directory, or use shorter names"
            )
        return path

    def remove_sockets(self, address: Address) -> None:
        """Remove the sockets left behind by an incarnation that is certainly dead; raises OSError."""
        for channel in Channel:
            self._path(address, channel).unlink(missing_ok=True)

    def write_host(self, record: HostRecord | None) -> None:
        """Write `host.json` (None: a mesh of one host, remove it) before any actor starts. Raises OSError."""
        if record is None:
            self.host_file.unlink(missing_ok=True)
            return
        replace_file(self.host_file, msgspec.json.encode(record) + b"\n")

    def host(self) -> HostRecord | None:
        """Which host of its mesh this is, None on a mesh of one host; raises `BindError` if the file is damaged."""
        try:
            return msgspec.json.decode(read_file(self.host_file), type=HostRecord)
        except FileNotFoundError:
            return None
        except (OSError, *NOT_JSON) as error:
            raise BindError(
                f"{self.host_file} does not say where this host listens ({error}): start the mesh on this host again"
            ) from error

    def host_name(self) -> str:
        """This host's name: the one in its mesh if that has several hosts, else the system's. Raises as `host` does."""
        record = self.host()
        return record.name if record is not None else socket.gethostname()

    def write_registry(self, address: Address, endpoint: Endpoint, proof: bytes = b"") -> None:
        content = _RegistryFile(*address, *msgspec.structs.astuple(endpoint), proof=proof.hex())
        replace_file(self.registry_file, msgspec.json.encode(content) + b"\n")

    def bootstrap(self, secret: HostSecret | None = None) -> "FileBootstrap":
        """Finds the registry by the file's current content; with the host's secret, only a registry that is proved."""
        return FileBootstrap(self.registry_file, secret)

    def _path(self, address: Address, channel: Channel) -> Path:
        return self.sockets / f"{address.actor_id}.{address.epoch}.{'c' if channel == Channel.CONTROL else 'd'}"


def read_file(path: Path) -> bytes:
    """The content of a regular file of this user. Raises OSError for any other: a pipe or a device might never end."""
    # Checked on the descriptor, not on the path, which may refer to another file a moment later.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"it has mode {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}")
        return file.read(_MAX_FILE_BYTES)


def replace_file(path: Path, content: bytes) -> bool:
    """Replace a file's content. Atomic: readers see the old content or the new.

    If there is no room for a second file, the old one is overwritten and the result is False: for a moment readers may
    see neither. Raises OSError if the old one has no room either; it is then unchanged.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_over(path, content):
            raise
        return False
    return True


def _write_over(path: Path, content: bytes) -> bool:
    """Overwrite the blocks that a file already has, which works on a full disk; False if they are too few."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_blocks * 512 < len(content):
            return False
        os.pwrite(descriptor, content, 0)
        os.truncate(descriptor, len(content))
        # Touched again now that it is complete, so that a reader that has seen it half written reads it again.
        os.utime(descriptor)
        return True
    finally:
        os.close(descriptor)


class FileBootstrap:
    """Implements `mesh.membership.view.Bootstrap` over `registry.json`; reads it only when it was replaced."""

    def __init__(self, path: Path, secret: HostSecret | None = None) -> None:
        self._path = path
        self._secret = secret
        self._seen: tuple[int, int] | None = None
        self._target: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        try:
            status = self._path.stat()
            if self._seen != (status.st_ino, status.st_mtime_ns):
                found = msgspec.json.decode(read_file(self._path), type=_RegistryFile)
                actor_id, epoch, *where, proof = msgspec.structs.astuple(found)
                address = Address(actor_id, epoch)
                self._target = (address, Endpoint(*where)) if self._is_proved(address, proof) else None
                self._seen = status.st_ino, status.st_mtime_ns
        except (OSError, *NOT_JSON):
            self._seen = self._target = None
        return self._target

    def _is_proved(self, address: Address, proof: str) -> bool:
        # A registry that somebody else has started would capture the whole mesh; the mesh's own will rewrite the file.
        if self._secret is None or not self._secret.is_local(address.actor_id):
            return True
        return hmac.compare_digest(self._secret.prove(*address, REGISTRY), bytes.fromhex(proof))
