"""What a supervisor keeps on disk about its mesh: who runs, under which lock, which epochs are used.

    <run directory>/
        lock              flock held by the living supervisor, its pid and start time inside
        manifest.json     its pid and endpoint, and every process, segment prefix and log it owns; replaced atomically
        epochs.json       the last epoch issued to each actor id, over all supervisors; lost with a container's files
        configs/          one JSON file per actor
        actors.json       the roles of the actors of the last mesh, running or not, by id
        logs/             one file per actor, and one rotated away
        requests/         one file per gateway with a line for each call, and one before it; its open calls
        trace/            what each actor did last, one file for each incarnation (`mesh/runtime/trace_ring.py`)
        api_keys          hashes of the keys that KVMESH_API_KEYS has, while the mesh runs

The supervisor is the only writer (except in requests/ and trace/). `meshctl ps|down|logs|trace` and the next
`up` read.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cli.errors import AlreadyRunning, BadManifest, CliError
from cli.plan.names import agent_id
from cli.supervisor.processes.by_pid import Process
from mesh.address import MAX_EPOCH, Address, Endpoint, host_of
from mesh.errors import BindError
from mesh.membership.view import SUPERVISOR
from mesh.runtime.own_files import NOT_JSON, read_file, replace_file
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.trace_ring import TRACE
from nodes.roles import GATEWAY

REQUESTS: Final = "requests"
"""The folder of the gateways' request logs, which they write themselves."""
_FILE_MODE: Final = 0o600

Content = TypeVar("Content")


def segment_prefix(uid: int, mesh: str, host: str = "") -> str:
    """How names of a mesh's segments begin; one of several hosts adds its name, since two may share a directory.

    The dots, which no mesh's name has, keep `a` apart from `a-b`; the underscore keeps hosts apart from meshes.
    """
    return f"kvmesh-{uid}.{mesh}{'_' if host else ''}{host}."


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process; `start_time` (clock ticks since boot) tells it from a later one with its pid."""

    actor_id: str
    role: str
    pid: int
    start_time: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on this host that has to be gone when the mesh is."""

    mesh: str
    pid: int
    start_time: int
    epoch: int
    control: str
    data: str
    url: str
    pool_directory: str
    pool_prefix: str
    supervisor_id: str = SUPERVISOR
    processes: list[ProcessRecord] = []

    @property
    def supervisor(self) -> tuple[Address, Endpoint]:
        return Address(self.supervisor_id, self.epoch), Endpoint(self.control, self.data)


class _Pools(msgspec.Struct, frozen=True):
    """The part of a kv_agent's configuration that says where its segments are."""

    directory: str = "/dev/shm"


class MeshDirectory:
    """The run directory of one mesh, with what its supervisor keeps there."""

    def __init__(self, mesh: str) -> None:
        self.mesh = mesh
        self.run = RunDirectory.of_mesh(mesh)
        self.path = self.run.path
        self.is_new = False
        self.logs = self.path / "logs"
        self.requests = self.path / REQUESTS
        self.traces = self.path / TRACE
        self.manifest = self.path / "manifest.json"
        self._epochs = self.path / "epochs.json"
        self._actors = self.path / "actors.json"
        self._lock = self.path / "lock"
        self.api_keys = self.path / "api_keys"

    @classmethod
    def all_names(cls) -> list[str]:
        base = RunDirectory.of_mesh("x").path.parent
        try:
            return sorted(path.name for path in base.iterdir())
        except OSError:
            return []

    def create(self) -> None:
        """Make the directories, for this user only. Raises CliError where others may enter them."""
        with self.written("made", "make it writable"):
            self.is_new = not self.path.exists()
            for path in (self.path.parent, self.path, self.run.sockets, self.logs, self.path / "configs"):
                path.mkdir(mode=0o700, parents=False, exist_ok=True)
                self._require_own(path)

    def remove_new(self) -> None:
        """Remove the directory if it was just made, since nothing was begun in it. Under the lock."""
        if self.is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def remove_unused(self) -> None:
        """Remove the directory if it has nothing but empty folders and epochs, which go on from the clock without it.

        For an actor that no supervisor started. Others may be using it: their sockets are there.
        """
        folders = [self.run.sockets, self.logs, self.path / "configs"]
        with contextlib.suppress(OSError):
            if {*self.path.iterdir()} <= {*folders, self._epochs}:
                for folder in folders:
                    folder.rmdir()
                self._epochs.unlink(missing_ok=True)
                self.path.rmdir()

    @contextlib.contextmanager
    def written(self, what: str = "written", do: str = "make room there") -> Generator[None]:
        """For writes without which a supervisor cannot go on. Raises CliError if they fail."""
        try:
            yield
        except OSError as error:
            raise CliError(
                f"the run directory {self.path} cannot be {what}",
                why=str(error),
                do=f"{do}, or set XDG_RUNTIME_DIR to a directory of yours",
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Be this mesh's supervisor. Raises AlreadyRunning."""
        with self.written():
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self.already_running() from None
            yield
        finally:
            os.close(descriptor)

    def sign_lock(self) -> None:
        """Write into the lock that this process is the supervisor, before a manifest says so. Under the lock."""
        with contextlib.suppress(OSError):
            self._lock.write_text("{} {}\n".format(*Process.of(os.getpid())))

    def holder(self) -> Process | None:
        """The process that signed the lock last. While it lives it is the supervisor, even if no manifest says so."""
        with contextlib.suppress(OSError, ValueError):
            pid, started = read_file(self._lock).split()
            return Process(int(pid), int(started))
        return None

    def load_manifest(self) -> Manifest | None:
        """The last manifest written; None if there is none.

        Raises BadManifest if it must not be acted on, and CliError if the whole directory is another user's.
        """
        try:
            self._require_own(self.path)
            manifest = msgspec.json.decode(read_file(self.manifest), type=Manifest)
        except FileNotFoundError:
            return None
        except (OSError, *NOT_JSON) as error:
            raise self._bad_manifest(str(error)) from None
        # What it names gets killed and removed, so it may name only what is this mesh's own.
        prefix = segment_prefix(os.getuid(), self.mesh, host_of(manifest.supervisor_id))
        if manifest.mesh != self.mesh:
            raise self._bad_manifest(f"it is the manifest of a mesh named {manifest.mesh!r}")
        if manifest.pool_prefix != prefix or not Path(manifest.pool_directory).is_absolute():
            found = f"{manifest.pool_directory!r} that begin with {manifest.pool_prefix!r}"
            raise self._bad_manifest(f"it names segments in {found}, but this mesh's begin with {prefix!r}")
        return manifest

    def read_manifest(self) -> Manifest | None:
        """The last manifest written; None if there is none, or it cannot be trusted."""
        try:
            return self.load_manifest()
        except CliError:
            return None

    def write_manifest(self, manifest: Manifest) -> None:
        _write(self.manifest, manifest)

    def remove_manifest(self) -> None:
        self.manifest.unlink(missing_ok=True)

    def epochs(self) -> dict[str, int]:
        """The last epoch issued to each actor id, as recorded; empty if the file is lost or damaged."""
        return self._load_epochs()[0]

    def _load_epochs(self) -> tuple[dict[str, int], str]:
        """The epochs, and why they cannot be read; that is empty if they can, or none were recorded yet."""
        try:
            epochs = msgspec.json.decode(read_file(self._epochs), type=dict[str, int])
        except FileNotFoundError:
            return {}, ""
        except (OSError, *NOT_JSON) as error:
            return {}, str(error)
        if not all(0 <= epoch < MAX_EPOCH for epoch in epochs.values()):
            return {}, "it has an epoch that no actor can have"
        return epochs, ""

    def last_epoch(self, actor_id: str) -> int:
        """The number that an actor's next epoch has to exceed: the last one issued, or the clock's Unix seconds.

        Thanks to the clock, epochs grow even if the file is gone, as in a container that is made anew. If the clock is
        behind too, the registry's refusal names the epoch that it knows, see `mesh/supervision/core.py`.
        """
        # One epoch a second is more than restarts use: 10 a minute, not counting kills by hand.
        return max(self.epochs().get(actor_id, 0), int(time.time()))

    def issue(self, actor_id: str, epoch: int, tell: Callable[[str], object] = lambda _: None) -> None:
        """Record an epoch before it is used. Raises OSError if it cannot be recorded at all.

        `tell` is called if the record was damaged: this replaces it, and what it held is lost; and if there is only
        room to write over the last record.
        """
        epochs, damage = self._load_epochs()
        if damage:
            tell(f"{self._epochs} is damaged ({damage}): it is written anew, and epochs go on from the clock")
        epochs[actor_id] = max(epoch, epochs.get(actor_id, 0))
        if not replace_file(self._epochs, msgspec.json.encode(epochs)):
            address = Address(actor_id, epoch)
            tell(f"no room in {self.path}: the epoch of {address} is written over the last record; make room")

    def write_config(self, actor_id: str, config: dict[str, Any]) -> Path:
        path = self.path / "configs" / f"{actor_id}.json"
        _write(path, config)
        return path

    def pool_directory(self) -> str:
        """Where the kv_agent that was started last has its segments, for when no manifest says so."""
        # Found by its name, which on a mesh of several hosts includes the host.
        configs = sorted((self.path / "configs").glob(f"{agent_id('')}*.json"), key=lambda path: path.lstat().st_mtime)
        told = _read(configs[-1], _Pools) if configs else None
        return told.directory if told is not None and Path(told.directory).is_absolute() else _Pools().directory

    def segments(self) -> str:
        """How names of segments of the mesh that ran here last begin, for when no manifest says so."""
        # Without the file that says which host this was, the names of what it left behind are not known.
        return segment_prefix(os.getuid(), self.mesh, self.host)

    @property
    def host(self) -> str:
        """Which host of its mesh this is or was, as far as is known; "" on a mesh of one host."""
        with contextlib.suppress(BindError):
            if (record := self.run.host()) is not None:
                return record.name
        return ""

    def write_actors(self, roles: dict[str, str]) -> None:
        _write(self._actors, roles)

    def actors(self) -> dict[str, str]:
        """The roles of the actors of the last mesh by id; empty if they were not recorded, or cannot be read."""
        return _read(self._actors, dict[str, str]) or {}

    def log(self, actor_id: str) -> Path:
        return self.logs / f"{actor_id}.log"

    def already_running(self) -> AlreadyRunning:
        manifest, holder = self.read_manifest(), self.holder()
        if manifest is not None:
            who = f"its supervisor is process {manifest.pid}"
            host = host_of(manifest.supervisor_id)
            if not host or any(process.role == GATEWAY for process in manifest.processes):
                # The URL is of the mesh's gateway, which may be on another host.
                who += f", at {manifest.url}"
        else:
            # Either it is starting, or its manifest was damaged in the last second.
            who = "it is starting" if holder is None else f"its supervisor is process {holder.pid}"
            host = self.host
        if host:
            return AlreadyRunning(
                f"host {host} of the mesh {self.mesh!r} is running",
                why=f"{who}, and uses the run directory {self.path}",
                do=f"stop it with `meshctl down --host {host} --name {self.mesh}`; to run several hosts of a mesh on "
                "one machine, give each an XDG_RUNTIME_DIR of its own",
            )
        return AlreadyRunning(
            f"a mesh named {self.mesh!r} is running",
            why=who,
            do=f"stop it with `meshctl down --name {self.mesh}`, or give this one another --name",
        )

    def _bad_manifest(self, why: str) -> BadManifest:
        return BadManifest(
            f"{self.manifest} cannot be used",
            why=why,
            do=f"`meshctl down --name {self.mesh}` stops the mesh if it runs, and removes what is left of it",
        )

    @staticmethod
    def _require_own(path: Path) -> None:
        # `lstat`: a link to a directory of this user's is still somebody else's to change.
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise CliError(
                f"{path} cannot be used",
                why="another user owns it, or may enter it",
                do="remove it, or set XDG_RUNTIME_DIR to a directory of yours",
            )


def _read(path: Path, kind: type[Content]) -> Content | None:
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except (OSError, *NOT_JSON):
        return None


def _write(path: Path, content: object) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(content)))
