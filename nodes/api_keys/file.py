"""The file of API keys on a host: read at the start, and again whenever it has changed."""

import contextlib
import os
from pathlib import Path
from typing import Final

from mesh.runtime.own_files import WatchedFile, read_file
from nodes.api_keys.entries import MAX_KEYS, ApiKey, BadApiKeys, KeyTable, as_lines, digest_of, read_lines, sha256_of

_MAX_BYTES: Final = 4 << 20
"""400 bytes for each of `MAX_KEYS`, with room for comments; whatever else lies there must not take all memory."""


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of the file. Raises BadApiKeys, also if others may read the file."""
    try:
        # A link is followed: what mounts secrets into a container makes links to them.
        content = read_file(path, _MAX_BYTES + 1, is_secret=True, follows=True)
    except OSError as error:
        raise BadApiKeys(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise BadApiKeys(f"{path} has more than {_MAX_BYTES >> 20} MiB")
    try:
        return read_lines(content.decode())
    except UnicodeDecodeError:
        raise BadApiKeys(f"{path} is not text") from None
    except BadApiKeys as error:
        raise BadApiKeys(f"{path}: {error.message}") from None


def write_key_file(path: Path, keys: tuple[ApiKey, ...]) -> None:
    """Write a new file that only this user may read. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(as_lines(keys))


class KeyFile:
    """The keys in force. Raises BadApiKeys if they cannot be read at first."""

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile(path)
        self._file.has_changed()
        self.trouble = ""
        """Why the file cannot be used now; meanwhile the last keys read stay in force."""
        self._keys: tuple[ApiKey, ...] = ()
        self._revoked: dict[bytes, str] = {}
        self._take(read_key_file(path))

    def find(self, sent: bytes) -> ApiKey | None:
        return self._table.find(sent)

    def revoked(self, sent: bytes) -> str:
        """The name that a key had in an earlier file, if that was read here; "" of any other."""
        return self._revoked.get(sha256_of(sent), "")

    def poll(self) -> bool:
        """Read the file again if it was replaced or changed. Returns whether keys or trouble did. Costs a `stat`."""
        if not self._file.has_changed():
            return False
        before = self.digest, self.trouble
        try:
            self._take(read_key_file(self._file.path))
            self.trouble = ""
        except BadApiKeys as error:
            self.trouble = error.message
        return before != (self.digest, self.trouble)

    def _take(self, keys: tuple[ApiKey, ...]) -> None:
        self._table, self.digest, self.num_keys = KeyTable(keys), digest_of(keys), len(keys)
        self._revoked |= {key.sha256: key.name for key in self._keys}
        for key in keys:
            self._revoked.pop(key.sha256, None)
        while len(self._revoked) > MAX_KEYS:
            # The oldest: a file that is written anew each day must not take all memory in the end.
            del self._revoked[next(iter(self._revoked))]
        self._keys = keys
