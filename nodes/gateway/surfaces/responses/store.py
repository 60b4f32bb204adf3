"""Responses that clients come back to: one SQLite file, which every gateway of a host opens.

Blocking; `kept.py` calls it in a thread. Writers of several processes take turns (WAL), and a killed one leaves nothing
half written. The oldest entries go when there are too many.
"""

import contextlib
import sqlite3
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple

_VERSION: Final = 1
"""Of the tables below. A file of another version is not touched."""
_BUSY_S: Final = 5.0
"""Another gateway holds the lock for a write: milliseconds, with a slow disk under it a second or two."""
_COMPRESSION: Final = 1
"""Conversations in JSON take a third of their size at the fastest level, and 5 ms for a megabyte."""
_TABLES: Final = f"""
CREATE TABLE responses (
    serial INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, size INTEGER NOT NULL,
    response BLOB NOT NULL, items BLOB NOT NULL
);
CREATE TABLE used (bytes INTEGER NOT NULL);
INSERT INTO used VALUES (0);
CREATE TRIGGER added AFTER INSERT ON responses BEGIN UPDATE used SET bytes = bytes + new.size; END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN UPDATE used SET bytes = bytes - old.size; END;
PRAGMA user_version = {_VERSION};
"""


class StoreUnusable(Exception):
    """The file cannot be opened, read or written: why, and what to do."""


class StoreTooSmall(StoreUnusable):
    """One entry alone is larger than all of the store may be."""


class StoredResponse(NamedTuple):
    """The response as it was answered, and all items up to its end, both as JSON."""

    response: bytes
    items: bytes


class ResponseStore:
    """The entries of at most `max_bytes` in all, each its owner's. Used by one thread."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._connection: sqlite3.Connection | None = None

    def put(self, response_id: str, owner: str, stored: StoredResponse) -> None:
        """Raises StoreUnusable."""
        response, items = (zlib.compress(part, _COMPRESSION) for part in stored)
        size = len(response) + len(items)
        if size > self._max_bytes:
            message = f"a response of {size} bytes is larger than the store ({self._max_bytes} bytes): give it more"
            raise StoreTooSmall(message)
        with self._transaction() as connection:
            row = (response_id, owner, size, response, items)
            connection.execute("INSERT INTO responses (id, owner, size, response, items) VALUES (?, ?, ?, ?, ?)", row)
            # In the same transaction: otherwise a gateway that dies in between leaves more than there may be.
            while self._num_bytes(connection) > self._max_bytes:
                connection.execute("DELETE FROM responses WHERE serial = (SELECT min(serial) FROM responses)")

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """None if there is none of that owner. Raises StoreUnusable."""
        with self._transaction("DEFERRED") as connection:
            found = connection.execute(
                "SELECT response, items FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            ).fetchone()
        return None if found is None else StoredResponse(*map(zlib.decompress, found))

    def delete(self, response_id: str, owner: str) -> bool:
        """Whether there was one of that owner. Raises StoreUnusable."""
        with self._transaction() as connection:
            done = connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
        return done.rowcount > 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Generator[sqlite3.Connection]:
        try:
            connection = self._connection = self._connection or self._open()
            connection.execute(f"BEGIN {kind}")
            try:
                yield connection
            except BaseException:
                # After some failures SQLite has done so itself.
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except (sqlite3.Error, zlib.error) as error:
            # Opened again by the next call: the file may have been replaced, or its disk have room again.
            with contextlib.suppress(sqlite3.Error):
                self.close()
            raise StoreUnusable(f"{self._path}: {error}; make room, or make it writable, or remove it") from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if (version := _version(connection)) not in (0, _VERSION):
                raise StoreUnusable(f"{self._path} is of version {version}, and this server's is {_VERSION}; remove it")
            connection.execute("PRAGMA journal_mode = WAL")
            # A power failure may cost the last entries, the end of a process none.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            # Read again: another gateway may have made the tables meanwhile.
            for statement in _statements() if _version(connection) == 0 else ():
                connection.execute(statement)
            connection.execute("COMMIT")
        # Whatever it was, an open connection would hold the lock that others wait for.
        except BaseException:
            connection.close()
            raise
        return connection

    def _num_bytes(self, connection: sqlite3.Connection) -> int:
        return connection.execute("SELECT bytes FROM used").fetchone()[0]


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _statements() -> list[str]:
    # One by one: `executescript` would commit what is open, and another gateway could come between.
    statements: list[str] = []
    text = ""
    for line in _TABLES.strip().splitlines():
        text += f"{line}\n"
        if sqlite3.complete_statement(text):
            statements.append(text)
            text = ""
    return statements
