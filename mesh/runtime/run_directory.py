"""The run directory of one mesh on one host: its sockets, its identity, and where the live registry is.

    <base>/kvmesh-<uid>/<mesh name>/        0700
        host.json                           where actors of this host listen on tcp; absent on a mesh of one host
        s/<actor id>.<epoch>.c|.d           ipc sockets, control and data channel
        registry.json                       address and endpoint of the registry, which keeps it correct

Used by `mesh/run.py`, the registry actor and `cli`.
"""

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
from mesh.runtime.own_files import NOT_JSON, WatchedFile, read_file, replace_file
from mesh.transport.base import Channel

MAX_SOCKET_PATH_BYTES: Final = 100
"""A little less than Linux accepts (108), so that every system does."""


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


class FileBootstrap:
    """Implements `mesh.membership.view.Bootstrap` over `registry.json`; reads it only when it was replaced."""

    def __init__(self, path: Path, secret: HostSecret | None = None) -> None:
        self._file = WatchedFile(path)
        self._secret = secret
        self._target: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        if self._file.has_changed():
            self._target = self._read()
        return self._target

    def _read(self) -> tuple[Address, Endpoint] | None:
        try:
            found = msgspec.json.decode(read_file(self._file.path), type=_RegistryFile)
            actor_id, epoch, *where, proof = msgspec.structs.astuple(found)
            address = Address(actor_id, epoch)
            return (address, Endpoint(*where)) if self._is_proved(address, proof) else None
        except (OSError, *NOT_JSON):
            self._file.forget()
            return None

    def _is_proved(self, address: Address, proof: str) -> bool:
        # A registry that somebody else has started would capture the whole mesh; the mesh's own will rewrite the file.
        if self._secret is None or not self._secret.is_local(address.actor_id):
            return True
        return hmac.compare_digest(self._secret.prove(*address, REGISTRY), bytes.fromhex(proof))
