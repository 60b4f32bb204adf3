"""Reads the small files of a model's directory, none longer than such a file can be. Used by `directory.py`."""

import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from nodes.models.errors import ModelDamaged, ModelNotFound

MOST_TOKENIZER_BYTES: Final = 1 << 26
"""The largest that is published has 34 MB, for a vocabulary of 262,144 words."""
MOST_INDEX_BYTES: Final = 1 << 26
"""The largest that is published has 9 MB, for 91,991 tensors."""
_MOST_BYTES: Final = 1 << 24
"""`config.json` has kilobytes, `tokenizer_config.json` a hundred bytes for each added token: this is far more."""
_MOST_TEMPLATE_BYTES: Final = 1 << 20
"""The longest templates of known models have 20,000 characters (`MAX_TEMPLATE_CHARS` in `checking.py`)."""


class SmallFiles:
    """The files of `directory` by their names in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def require(self, name: str, most: int = _MOST_BYTES) -> dict[str, Any]:
        """The object in a JSON file of at most so many bytes. Raises ModelNotFound or ModelDamaged."""
        document = self._document(name, most)
        if not isinstance(document, dict):
            raise ModelDamaged(f"{self.directory / name} should hold a JSON object. Download it again.")
        return cast("dict[str, Any]", document)

    def require_objects(self, name: str) -> list[dict[str, Any]]:
        """The objects in the array of a JSON file. Raises ModelNotFound or ModelDamaged."""
        document = self._document(name)
        found = cast("list[Any]", document) if isinstance(document, list) else [document]
        if not isinstance(document, list) or not all(isinstance(one, dict) for one in found):
            raise ModelDamaged(f"{self.directory / name} should hold an array of JSON objects. Download it again.")
        return found

    def find(self, name: str) -> dict[str, Any]:
        """As `require`, but empty if there is no such file."""
        return self.require(name) if self.has(name) else {}

    def has(self, name: str) -> bool:
        # A link to nowhere is no missing file: what is left of a hub's cache that lost a blob would be served silently.
        return os.path.lexists(self.directory / name)

    def _document(self, name: str, most: int = _MOST_BYTES) -> Any:
        path = self.directory / name
        try:
            return json.loads(read_bytes(path, most))
        except (ValueError, RecursionError) as error:
            why = "its values are nested too deeply" if isinstance(error, RecursionError) else error
            raise ModelDamaged(f"{path} cannot be read as JSON: {why}. Download it again.") from error


def read_template_file(path: Path) -> str:
    """The text of a chat template. Raises ModelDamaged."""
    try:
        # Line ends as in files that are read as text, which is how transformers reads them.
        return read_bytes(path, _MOST_TEMPLATE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (UnicodeDecodeError, ModelNotFound) as error:
        why = "there is no such file" if isinstance(error, ModelNotFound) else error
        raise ModelDamaged(f"{path} cannot be read as text: {why}. Give a readable chat template.") from error


def open_file(path: Path) -> BinaryIO:
    if not path.is_file() and path.exists():
        # A pipe would be waited for without end.
        raise OSError(errno.EINVAL, "it is no file")
    return path.open("rb")


def read_bytes(path: Path, most: int) -> bytes:
    """The whole of a file. Raises ModelNotFound, or ModelDamaged if it cannot be read or has more than `most` bytes."""
    try:
        with open_file(path) as stream:
            # One byte more than is allowed: a file that grows, or a device without end, is found out just the same.
            content = stream.read(most + 1)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} is missing. Give a complete Hugging Face model directory.") from error
    except OSError as error:
        do = "Make it readable" if isinstance(error, PermissionError) else "Download it again"
        raise ModelDamaged(f"{path} cannot be read: {error.strerror}. {do}.") from error
    if len(content) > most:
        raise ModelDamaged(
            f"{path} has more than {most:,} bytes, so it cannot be what it is called. Download it again."
        )
    return content
