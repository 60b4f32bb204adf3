"""The run directory of one mesh on one host: where its sockets are, who it is, which registry is the living one.

    <base>/kvmesh-<uid>/<mesh name>/        0700
        host.json                           where actors of this host listen on tcp; absent on a mesh of one host
        s/<actor id>.<epoch>.c|.d           ipc sockets, control and data channel
        registry.json                       address and endpoint of the registry, which keeps it as it has to be

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
"""A little under what the kernel takes (108), so that every system does."""

NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises of a damaged file: bytes that are no UTF-8 raise a ValueError."""

_MAX_FILE_BYTES: Final = 1 << 24


class HostRecord(msgspec.Struct, frozen=True):
    """One host of a mesh of several: its actors listen on `bind`, and actors of other hosts dial `address`.

    `bind` is an IP address of the host (`0.0.0.0` and `::`: all of them), `address` an IP address or a name.
    `insecure`: tcp beyond loopback is wanted although nothing on it is encrypted or authenticated. `keys` is the
    directory of the host's keys (`mesh/runtime/key_files.py`); "": tcp is plain. `spec` is what the host takes the mesh
    to be (`mesh/membership/spec.py`), which its actors say when they join. `ports`, first and last, are those to listen
    on where that matters, to a firewall say.
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
        """The run directory of a mesh by its name, for the current user."""
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
        return cls(base / f"kvmesh-{os.getuid()}" / name)

    @property
    def mesh(self) -> str:
        """The name of its mesh."""
        return self.path.name

    def create(self) -> None:
        """Make the directories; raises `BindError` if somebody else owns or may write them."""
        # One by one: the mode of a directory made for `parents` is not ours to say.
        for path in (self.path.parent, self.path, self.sockets):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            mine = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if not mine and (path != self.path.parent or status.st_uid not in (0, os.getuid())):
                raise BindError(
                    f"{path} may be entered by other users: remove it, or set XDG_RUNTIME_DIR to a directory of yours"
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
        """Remove what an incarnation that is dead for certain has left; raises OSError."""
        for channel in Channel:
            self._path(address, channel).unlink(missing_ok=True)

    def write_host(self, record: HostRecord | None) -> None:
        """Say which host this is, None of a mesh of one, before any of its actors starts. Raises OSError."""
        if record is None:
            self.host_file.unlink(missing_ok=True)
            return
        replace_file(self.host_file, msgspec.json.encode(record) + b"\n")

    def host(self) -> HostRecord | None:
        """Which host of its mesh this is, None on a mesh of one; raises `BindError` where the file is damaged."""
        try:
            return msgspec.json.decode(read_file(self.host_file), type=HostRecord)
        except FileNotFoundError:
            return None
        except (OSError, *NOT_JSON) as error:
            raise BindError(
                f"{self.host_file} does not say where this host listens ({error}): start the mesh of this host again"
            ) from error

    def host_name(self) -> str:
        """What this host is called: by its mesh where that has several, else by itself. Raises as `host` does."""
        record = self.host()
        return record.name if record is not None else socket.gethostname()

    def write_registry(self, address: Address, endpoint: Endpoint, proof: bytes = b"") -> None:
        """Say which registry is the living one, as `replace_file` does. Raises OSError."""
        content = _RegistryFile(*address, *msgspec.structs.astuple(endpoint), proof=proof.hex())
        replace_file(self.registry_file, msgspec.json.encode(content) + b"\n")

    def bootstrap(self, secret: HostSecret | None = None) -> "FileBootstrap":
        """Where the registry is, as the file says at each moment; with the host's secret only of one that is proved."""
        return FileBootstrap(self.registry_file, secret)

    def _path(self, address: Address, channel: Channel) -> Path:
        return self.sockets / f"{address.actor_id}.{address.epoch}.{'c' if channel == Channel.CONTROL else 'd'}"


def read_file(path: Path) -> bytes:
    """The content of a plain file of this user's. Raises OSError for any other: a pipe would not end, nor a device."""
    # Checked on the descriptor, not on the path, which may be another file a moment later.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"it is {stat.filemode(status.st_mode)} of user {status.st_uid}")
        # Bounded: a file of any size under this name must not take the process's memory.
        return file.read(_MAX_FILE_BYTES)


def replace_file(path: Path, content: bytes) -> bool:
    """Give a file another content. Atomic: readers see the old or the new.

    Where there is no room for a second file the old one is written over, and the answer is False: for a moment readers
    may see neither. Raises OSError where the old one has not the room either; it is then as it was.
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
    """Write into the blocks that a file has already, which a full disk does not refuse; False if they are too few."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_blocks * 512 < len(content):
            return False
        os.pwrite(descriptor, content, 0)
        os.truncate(descriptor, len(content))
        # Once more, now that it is whole: who has read it meanwhile looks again when this changes.
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
        """The registry's incarnation and endpoint; None while there is no readable file."""
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
        # One that somebody else has started would take the whole mesh along; the mesh's own writes the file anew.
        if self._secret is None or not self._secret.is_local(address.actor_id):
            return True
        return hmac.compare_digest(self._secret.prove(*address, REGISTRY), bytes.fromhex(proof))
