"""The key files of a host, written by `meshctl keys` and read by every actor on the host.

DIRECTORY                   0700
DIRECTORY/host.json         0600, this host's key pair
DIRECTORY/allowed.json      0600, the hosts of the mesh: the list itself on the registry's host, elsewhere a copy of it
"""

import os
import stat
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mesh.errors import MeshError
from mesh.membership.keys import AllowList, BadKey, HostKey
from mesh.membership.view import Member
from mesh.runtime.run_directory import NOT_JSON, replace_file

_MAX_BYTES: Final = 4 << 20
"""1 KB for each of `MAX_HOSTS`; one with name, key and a few roles has 200 bytes. Damage must not take all memory."""
_Content = TypeVar("_Content", HostKey, AllowList)


class KeyFileError(MeshError, code="bad_keys"):
    """A key file or its directory is not accessible, or is accessible to others; says which, and what to do."""


class DamagedKeyFile(KeyFileError):
    """The content of a key file is not valid; `fault` is what the file is instead."""

    def __init__(self, file: Path, fault: str) -> None:
        super().__init__(f"{file} is {fault}: put the right file back")
        self.fault = fault


class KeyDirectory:
    """The key files of one host for one mesh, made by the first write. Methods raise KeyFileError; None: no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key_file = path / "host.json"
        self.allowed_file = path / "allowed.json"

    def read_key(self) -> HostKey | None:
        return self._read(self.key_file, HostKey)

    def write_key(self, key: HostKey) -> None:
        self._write(self.key_file, key)

    def read_allowed(self) -> AllowList | None:
        return self._read(self.allowed_file, AllowList)

    def write_allowed(self, allowed: AllowList) -> None:
        """Readers see the old list or the new one."""
        self._write(self.allowed_file, allowed)

    def _read(self, file: Path, kind: type[_Content]) -> _Content | None:
        try:
            self._require_own(self.path, self.path.stat())
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as opened:
                status = os.fstat(descriptor)
                self._require_own(file, status)
                if not stat.S_ISREG(status.st_mode):
                    raise DamagedKeyFile(file, "not a regular file")
                content = opened.read(_MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KeyFileError(f"{file} cannot be read ({error.strerror}): make this user its owner") from error
        try:
            decoded = msgspec.json.decode(content, type=kind)
            decoded.check()
        except (*NOT_JSON, BadKey) as error:
            # Of a BadKey only the message: its code would add nothing.
            why = error.message if isinstance(error, BadKey) else error
            raise DamagedKeyFile(file, f"damaged ({why})") from error
        return decoded

    def _write(self, file: Path, content: HostKey | AllowList) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_own(self.path, self.path.stat())
            before = os.umask(0o077)
            try:
                replace_file(file, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            finally:
                os.umask(before)
        except OSError as error:
            raise KeyFileError(
                f"{file} cannot be written ({error.strerror}): make this user owner of the directory"
            ) from error

    @staticmethod
    def _require_own(path: Path, status: os.stat_result) -> None:
        if status.st_uid != os.getuid():
            raise KeyFileError(f"{path} belongs to user {status.st_uid}: only the owner of keys may read them")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise KeyFileError(f"{path} may be read or changed by other users: chmod go-rwx {path}")


class KeyRing:
    """The keys in force: this host's pair, and the list, read again when its file has changed. Raises KeyFileError."""

    def __init__(self, directory: KeyDirectory) -> None:
        self._directory = directory
        own, allowed = directory.read_key(), directory.read_allowed()
        if own is None or allowed is None:
            missing = directory.key_file if own is None else directory.allowed_file
            raise KeyFileError(f"{missing} does not exist: make keys with `meshctl keys new`")
        self.own: HostKey = own
        self.allowed: AllowList = allowed
        self.trouble = ""
        """Why the list's file cannot be read; meanwhile the last list read stays in force."""
        self._seen = self._look()
        # What became of the file that can be written again; empty if nothing did.
        self._fault = ""

    def vet(self, member: Member) -> None:
        self.allowed.vet(member)

    def write(self, allowed: AllowList) -> None:
        self._directory.write_allowed(allowed)

    def poll(self) -> bool:
        """Read the list again if its file was replaced. Returns whether it changed. Cheap, called every heartbeat."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            allowed = self._directory.read_allowed()
        except KeyFileError as error:
            self.trouble = error.message
            self._fault = error.fault if isinstance(error, DamagedKeyFile) else ""
            if not self._fault:
                # It could not be opened at the moment, for lack of a descriptor, say: try again at the next poll.
                self._seen = None
            return False
        # If the key pair is gone too, an operator wants this host to have no keys.
        self._fault = "gone" if allowed is None and self._directory.key_file.exists() else ""
        self.trouble = "" if allowed is not None else f"{self._directory.allowed_file} is gone: put it back"
        if allowed is None or allowed == self.allowed:
            return False
        self.allowed = allowed
        return True

    def restore(self) -> str:
        """Replace a damaged or missing file with the list in force. Returns what was wrong and done; empty: nothing.

        Otherwise no actor on this host could start again. One process of the host calls this from time to time.
        """
        self.poll()
        if not (fault := self._fault):
            return ""
        try:
            self._directory.write_allowed(self.allowed)
        except KeyFileError as error:
            self.trouble = error.message
            return ""
        self.poll()
        return f"{self._directory.allowed_file} was {fault}: the right file was written again"

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._directory.allowed_file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
