"""What a request may ask of its draws: the table of all asks.

A new one is a file here, a line in `ASKS`, its test and a line in docs/operations.md.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from nodes.asks.allowed_token_ids import AllowedTokenIds
from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields, InvalidAsk
from nodes.asks.bad_words import BadWords
from nodes.asks.edits import EditFailed, Editor, LogprobsOf, RowEdits, RowReads
from nodes.asks.grammar import Grammar
from nodes.asks.logit_bias import LogitBias
from nodes.asks.logprobs import Logprobs
from nodes.asks.min_tokens import MinTokens
from nodes.asks.penalties import Penalties
from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.request import MAX_ASK_BYTES, Asked

ASKS: Final[tuple[type[Ask], ...]] = (
    RepetitionPenalty,
    LogitBias,
    MinTokens,
    AllowedTokenIds,
    BadWords,
    Penalties,
    Logprobs,
    # The last one: it sees what the others have left.
    Grammar,
)
_BY_NAME: Final = {ask.name: ask for ask in ASKS}
ASK_NAMES: Final = tuple(_BY_NAME)
"""All that a worker may announce; `possible` says what it does."""
_DECODERS: Final[dict[str, msgspec.msgpack.Decoder[Ask]]] = {ask.name: msgspec.msgpack.Decoder(ask) for ask in ASKS}
_encode = msgspec.msgpack.Encoder().encode


def fields_of(route: Literal["chat", "text"]) -> dict[str, Any]:
    """The HTTP fields of all asks on a route, with the types of their values."""
    fields: dict[str, Any] = {}
    for ask in ASKS:
        fields |= ask.chat_fields if route == "chat" else ask.text_fields
    return fields


def possible(model: DrawnModel) -> list[str]:
    """The names of the asks that a worker of this model announces. May take seconds: tokenizers are loaded."""
    return [ask.name for ask in ASKS if ask.is_possible(model)]


def check_asks(asks: Collection[Asked]) -> list[str]:
    """Check the values of asks as far as they need it, and return what of them will be ignored, in words.

    May run out of time and memory, panic or die. Raises InvalidAsk.
    """
    notes: list[str] = []
    for one in asks:
        if (decoder := _DECODERS.get(one.name)) is not None:
            notes += decoder.decode(one.value).check()
    return notes


def field_of(one: Asked) -> str | None:
    """The HTTP field that an ask came from, for errors about it."""
    try:
        return _DECODERS[one.name].decode(one.value).field
    except (KeyError, msgspec.DecodeError):
        return None


def read_asks(body: Mapping[str, Any], limits: AskLimits) -> list[Ask]:
    """The asks of a request's body. Raises InvalidAsk."""
    return [found for ask in ASKS if (found := ask.read(body, limits)) is not None]


def asked(asks: Sequence[Ask]) -> list[Asked]:
    """Asks as they go over the wire. Raises InvalidAsk if they are too long."""
    sent = [Asked(ask.name, ask.looks_back, _encode(ask)) for ask in asks]
    if (num_bytes := sum(len(one.value) for one in sent)) > MAX_ASK_BYTES:
        longest = max(zip(sent, asks, strict=True), key=lambda pair: len(pair[0].value))[1]
        param = longest.field
        raise InvalidAsk(
            f"What this request asks of its draws takes {num_bytes} bytes; at most {MAX_ASK_BYTES} can be served, and"
            f" '{param}' takes the most.",
            param,
        )
    return sent


class Opened(NamedTuple):
    """The asks of a sequence that a worker opens. `problem`, if not empty, says which cannot be served here."""

    editors: tuple[Editor, ...] = ()
    reads: RowReads | None = None
    problem: str = ""


_NOTHING: Final = Opened()


def open_asks(asks: Collection[Asked], model: DrawnModel) -> Opened:
    """Editors and reads of a sequence; each time it is opened they are new."""
    if not asks:
        return _NOTHING
    editors: list[Editor] = []
    reads: RowReads | None = None
    for one in asks:
        decoder = _DECODERS.get(one.name)
        if decoder is None:
            return Opened(problem=f"this worker does not know the ask {one.name!r}")
        try:
            ask = decoder.decode(one.value)
        except msgspec.DecodeError as error:
            return Opened(problem=f"the value of the ask {one.name!r} cannot be read: {error}")
        editor = ask.editor(model)
        if editor is not None:
            editors.append(editor)
        reads = ask.reads() or reads
    return Opened(tuple(editors), reads)


__all__ = [
    "ASKS",
    "ASK_NAMES",
    "Ask",
    "AskLimits",
    "DrawnModel",
    "EditFailed",
    "Editor",
    "Fields",
    "InvalidAsk",
    "LogprobsOf",
    "Opened",
    "RowEdits",
    "RowReads",
    "asked",
    "check_asks",
    "field_of",
    "fields_of",
    "open_asks",
    "possible",
    "read_asks",
]
