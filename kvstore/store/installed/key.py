"""The key by which a mesh knows the values that it put into a store into which others can write. Without numpy.

All hosts of a mesh have the same file. It is none of the key pairs of hosts (`mesh/membership/keys.py`): those say who
speaks to one other host, while a value is read by every host, when whoever put it may be gone.
"""

import os
import stat
from pathlib import Path
from typing import Final

from kvstore.errors import StoreKeyUnusable

MIN_BYTES: Final = 32
"""As many as SHA-256 has: a shorter key would be what is guessed."""
_MAX_BYTES: Final = 4096
"""A file that is larger was meant for something else."""


def read_key(path: str | Path) -> bytes:
    """What the file has, without spaces and line ends around it. Raises StoreKeyUnusable."""
    try:
        # One file, looked at and read: it cannot be replaced in between. A pipe would be waited for, so not that.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise StoreKeyUnusable(f"the key {path} is no file: name one (key_file of [kv.store])")
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
                raise StoreKeyUnusable(
                    f"the key {path} is {stat.filemode(status.st_mode)} and belongs to user {status.st_uid}: it must "
                    f"be user {os.geteuid()}'s, and nobody else's to read (chmod 600)"
                )
            key = file.read(_MAX_BYTES + 1).strip()
    except OSError as error:
        raise StoreKeyUnusable(f"the key {path} cannot be read ({error.strerror})") from None
    if not MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise StoreKeyUnusable(
            f"the key {path} has {len(key)} bytes, not {MIN_BYTES} to {_MAX_BYTES}: make one by "
            f"`openssl rand -hex 32`, and give the same file to every host"
        )
    return key
