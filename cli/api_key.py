"""API keys that `meshctl` sends: its own, `KVMESH_API_KEY`, or one in a file."""

from collections.abc import Mapping
from pathlib import Path

from cli.errors import BadKeys, WrongUsage
from cli.plan.sources import API_KEY_VARIABLE

_CHARACTERS = "a key has no spaces, and only characters of ASCII that can be printed"


def own_key(environment: Mapping[str, str]) -> str:
    """The key, empty if there is none. Raises WrongUsage if no header could carry it."""
    key = environment.get(API_KEY_VARIABLE, "").strip()
    if not _fits_header(key):
        raise WrongUsage(f"{API_KEY_VARIABLE} is not an API key", why=_CHARACTERS, do="correct it, or unset it")
    return key


def key_in(file: Path) -> str:
    """The key that is all there is in a file. Raises BadKeys."""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        do = "give a file that has the key and nothing else"
        raise BadKeys(f"{file} cannot be read", why=getattr(error, "strerror", None) or str(error), do=do) from error
    if not key or not _fits_header(key):
        do = "write the key itself into it; the file of `meshctl up --api-key-file` has only hashes of keys"
        raise BadKeys(f"there is no API key in {file}", why=_CHARACTERS, do=do)
    return key


def _fits_header(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key
