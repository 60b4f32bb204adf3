"""From the bytes of a body to a typed one, or to an error that names the parameter. For `jobs/validation.py`. Pure."""

import codecs
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from nodes.gateway.errors import BadRequest, unsupported
from nodes.gateway.fields.unsupported import IGNORED, NEUTRAL_VALUES, NeutralValues, is_neutral

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_MISSING = re.compile(r"missing required field `([^`]+)`")
_AT = re.compile(r" - at `(?:key in )?\$([^`]*)`$")
_INDEX = re.compile(r"\[(\d+)\]")
_BYTE = re.compile(r"\(byte (\d+)\)")
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_ESCAPED_PAIR_BYTES = 12
"""Both halves of a surrogate pair, `\\ud83d\\ude00`."""
_LEAST_TOKENS = " An answer has at least one token; leave the field out for the default."
_HINTS: dict[str | None, str] = {"max_tokens": _LEAST_TOKENS, "max_completion_tokens": _LEAST_TOKENS}


class Decoded(NamedTuple):
    """A typed body, the fields that were given, each as raw JSON, and the names of unknown ones."""

    body: Any
    fields: Mapping[str, Any]
    unknown_fields: list[str]


class BodyReader:
    """Decodes one kind of body; made once per route.

    Beside the type's own fields, those of `ignored` are known and have no effect, and those of `neutral` are refused
    unless they have one of its values.
    """

    def __init__(
        self,
        body_type: type[Struct],
        *,
        ignored: frozenset[str] = IGNORED,
        neutral: NeutralValues = NEUTRAL_VALUES,
    ) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body_type)
        self._known = ignored.union(body_type.__struct_fields__)
        self._neutral = neutral

    def decode(self, data: bytes) -> Decoded:
        """Raises `BadRequest`: malformed, too deep, wrong type or value, or known and not supported."""
        # Windows' editors and PowerShell put it before a file's text (RFC 8259, 8.1: a reader may ignore it).
        data = data.removeprefix(codecs.BOM_UTF8)
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"The body is not valid UTF-8 at byte {error.start}.", code="invalid_utf8") from None
        if not data.strip():
            raise BadRequest("The body is empty; send a JSON object.", code="invalid_json")
        try:
            fields = _FIELDS.decode(data)
            unknown = _check_fields(fields, self._known, self._neutral)
            return Decoded(self._decoder.decode(data), fields, unknown)
        # Raised by the decoder at some thousand nested brackets: the client's mistake, not a fault of this server.
        except RecursionError:
            raise BadRequest("The body is nested too deeply.", code="invalid_json") from None
        except msgspec.ValidationError as error:
            raise _explain(str(error)) from None
        except msgspec.DecodeError as error:
            problem = _lone_surrogate(data, str(error)) or f"The body is not valid JSON: {error}."
            raise BadRequest(problem, code="invalid_json") from None


def converted(fields: Mapping[str, Any], body_type: type[Struct]) -> Decoded:
    """A body from fields that are decoded; those that are None are not given. Raises `BadRequest` as a reader."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return Decoded(msgspec.convert(given, body_type, str_keys=True), given, [])
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def _check_fields(fields: dict[str, Raw], known: frozenset[str], neutral: NeutralValues) -> list[str]:
    unknown: list[str] = []
    for name, raw in fields.items():
        if name in known:
            continue
        if name not in neutral:
            unknown.append(name)
        elif not is_neutral(msgspec.json.decode(raw), neutral[name]):
            raise unsupported(f"'{name}' is not supported at this route. Leave it out.", name)
    return unknown


def _lone_surrogate(data: bytes, message: str) -> str:
    """The error message, if the decoder stopped at half a surrogate pair; else empty."""
    at = _BYTE.search(message)
    # Without a position, the decoder has met the end while it expected the other half.
    end = min(len(data), int(at[1]) + _ESCAPED_PAIR_BYTES) if at else len(data)
    # Search only near the position: the body may have megabytes, and elsewhere valid pairs may look like halves.
    begin = max(0, end - 3 * _ESCAPED_PAIR_BYTES)
    found = _LONE_SURROGATE.search(data[begin:end])
    if found is None:
        return ""
    return (
        f"The body contains the lone surrogate {found[0].decode()} at byte {begin + found.start()}: half of a pair,"
        " which is not a character by itself. Send the character as UTF-8, or both halves."
    )


def _explain(message: str) -> BadRequest:
    """Turn msgspec's "Expected `int` >= 1 - at `$.stop[0]`" into an error with `param` "stop.0"."""
    path = ""
    at = _AT.search(message)
    if at is not None:
        message = message[: at.start()]
        path = at[1]
    missing = _MISSING.search(message)
    if missing is not None:
        path += f".{missing[1]}"
    param = _INDEX.sub(r".\1", path).replace("[...]", "").strip(".") or None
    if missing is not None:
        return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    where = f"Invalid value for '{param}'" if param else "Invalid body"
    hint = _HINTS.get(param, "")
    return BadRequest(f"{where}: {message[:1].lower()}{message[1:]}.{hint}", param=param, code="invalid_value")
