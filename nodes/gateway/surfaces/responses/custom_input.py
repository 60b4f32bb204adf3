"""The text for a custom tool, read from the arguments of the function that stands for it, as they come. Pure."""

import json
import re
from typing import Any, Final, cast

from nodes.gateway.surfaces.responses.tools import CUSTOM_INPUT

_BEGIN: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_MAX_BEGIN_CHARS: Final = 256
"""No model writes so many blanks before the text; what is longer begins with another key."""
_UNCUT: Final = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"
)
"""Characters and whole escapes: both halves of a surrogate pair, or one that is none."""


class CustomInput:
    """`feed` gives the text that came with a piece of arguments, `close` what is left; `text` is all that was given."""

    def __init__(self) -> None:
        self.text = ""
        self._texts: list[str] = []
        self._begun = False
        # Before the text begins all arguments, then what may be part of an escape.
        self._held = ""
        self._more: list[str] = []

    def feed(self, arguments: str) -> str:
        """What is certain of the text with this piece of the arguments."""
        if not self._begun and len(self._held) > _MAX_BEGIN_CHARS:
            self._more.append(arguments)
            return ""
        self._held += arguments
        if not self._begun:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._begun, self._held = True, self._held[begin.end() :]
        found = _UNCUT.match(self._held)
        inside = found[0] if found else ""
        self._held = self._held[len(inside) :]
        return self._take(_decoded(inside))

    def close(self) -> str:
        """The rest. Arguments of another form than asked for are given as they are."""
        rest = "" if self._begun else self._take(_input_of(self._held + "".join(self._more)))
        self.text = "".join(self._texts)
        return rest

    def _take(self, text: str) -> str:
        self._texts.append(text)
        return text


def _input_of(arguments: str) -> str:
    try:
        given: Any = json.loads(arguments)
    except ValueError:
        return arguments
    value = cast("dict[str, Any]", given).get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return _as_text(value) if isinstance(value, str) else arguments


def _decoded(inside: str) -> str:
    try:
        # Not strictly: models write line ends into strings as they are.
        return _as_text(json.loads(f'"{inside}"', strict=False))
    except ValueError:
        return inside


def _as_text(text: str) -> str:
    """Half a surrogate pair, which JSON can say, is no character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
