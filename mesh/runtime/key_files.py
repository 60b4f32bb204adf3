"""The key files of a host, written by `meshctl keys` and read by every actor on the host.

DIRECTORY                   0700
DIRECTORY/host.json         0600, this host's key pair
DIRECTORY/allowed.json      0600, the hosts of the mesh: the list itself on the registry's host, elsewhere a copy of it
"""

import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mesh.errors import MeshError
from mesh.membership.keys import AllowList, BadKey, HostKey
from mesh.membership.view import Member
from mesh.runtime.own_files import NOT_JSON, NotPlain, NotPrivate, WatchedFile, read_file, replace_file, require_own

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
            require_own(self.path, self.path.stat())
            content = read_file(file, _MAX_BYTES, is_secret=True)
        except FileNotFoundError:
            return None
        except NotPrivate as error:
            raise KeyFileError(str(error)) from error
        except NotPlain as error:
            raise DamagedKeyFile(file, "not a regular file") from error
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
            require_own(self.path, self.path.stat())
            before = os.umask(0o077)
            try:
                replace_file(file, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            finally:
                os.umask(before)
        except NotPrivate as error:
            raise KeyFileError(str(error)) from error
        except OSError as error:
            raise KeyFileError(
                f"{file} cannot be written ({error.strerror}): make this user owner of the directory"
            ) from error


class KeyRing:
    """The keys in force: this host's pair, and the list, read again when its file has changed. Raises KeyFileError."""

    def __init__(self, directory: KeyDirectory) -> None:
        self._directory = directory
        self._file = WatchedFile(directory.allowed_file)
        self._file.has_changed()
        own, allowed = directory.read_key(), directory.read_allowed()
        if own is None or allowed is None:
            missing = directory.key_file if own is None else directory.allowed_file
            raise KeyFileError(f"{missing} does not exist: make keys with `meshctl keys new`")
        self.own: HostKey = own
        self.allowed: AllowList = allowed
        self.trouble = ""
        """Why the list's file cannot be read; meanwhile the last list read stays in force."""
        # What became of the file that can be written again; empty if nothing did.
        self._fault = ""

    def vet(self, member: Member) -> None:
        self.allowed.vet(member)

    def write(self, allowed: AllowList) -> None:
        self._directory.write_allowed(allowed)

    def poll(self) -> bool:
        """Read the list again if its file was replaced. Returns whether it changed. Cheap, called every heartbeat."""
        if not self._file.has_changed():
            return False
        try:
            allowed = self._directory.read_allowed()
        except KeyFileError as error:
            self.trouble = error.message
            self._fault = error.fault if isinstance(error, DamagedKeyFile) else ""
            if not self._fault:
                # It could not be opened at the moment, for lack of a descriptor, say: try again at the next poll.
                self._file.forget()
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
