"""`logprobs`, `top_logprobs`, `logprob_token_ids`: how likely the drawn token, the likeliest and the named ones were.

What a worker reads is one payload beside each token, little-endian: float32 logprob and int32 rank (from 1) of the
drawn token, then `(int32 id, float32 logprob)` of each of the `top` most likely, then the float32 logprob of each of
`ids`. `UNLIKELIEST` stands for minus infinity, which JSON cannot say.
"""

import struct
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, Fields, InvalidAsk
from nodes.asks.edits import MAX_TOP, UNLIKELIEST, RowReads
from nodes.request import TokenId

_MAX_IDS: Final = 128
"""Each is four bytes beside every token, on every hop."""
_Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]
_IDS: Final = {"logprob_token_ids": Annotated[list[TokenId], Meta(max_length=_MAX_IDS)]}


class Logprobs(Ask, frozen=True):
    """Read `top` and `ids` beside each token, of the model's own distribution, or of the `processed` one drawn from."""

    top: int = 0
    ids: list[int] = []
    processed: bool = False

    name: ClassVar[str] = "logprobs/1"
    chat_fields: ClassVar[Fields] = {"logprobs": bool, "top_logprobs": _Top, **_IDS}
    text_fields: ClassVar[Fields] = {"logprobs": _Top, **_IDS}

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        asked: int | bool | None = body["logprobs"]
        ids: list[int] = body["logprob_token_ids"] or []
        # 0, of completions, asks for the drawn tokens' alone; False, of chats, for nothing.
        if asked is None or asked is False:
            for param in ("top_logprobs", "logprob_token_ids"):
                if body.get(param):
                    raise InvalidAsk(f"'{param}' is only allowed when 'logprobs' is set.", param)
            return None
        limits.check_ids(ids, "logprob_token_ids")
        top = (body["top_logprobs"] or 0) if asked is True else asked
        return cls(top, ids, limits.logprobs_of == "processed")

    @override
    def reads(self) -> RowReads:
        return RowReads(self.top, tuple(self.ids), "processed" if self.processed else "raw")


class MalformedPayload(ValueError):
    """A worker's payload has another layout than what was asked of it."""


class Likelihoods:
    """Reads the payloads of one request, all of which have the same layout."""

    def __init__(self, reads: RowReads) -> None:
        self._top = reads.top
        self._layout = struct.Struct("<fi" + "if" * reads.top + f"{len(reads.ids)}f")
        self._ids = reads.ids

    def read(self, payload: bytes) -> tuple[float, list[tuple[int, float]]]:
        """Logprob of the drawn token, and ids with theirs: the most likely first, then the named ones not among them.

        Raises MalformedPayload.
        """
        logprob, _, pairs = self.read_ranked(payload)
        return logprob, pairs

    @property
    def size(self) -> int:
        """Bytes of a payload."""
        return self._layout.size

    def read_ranked(self, payload: bytes) -> tuple[float, int, list[tuple[int, float]]]:
        """The same, with the rank of the token among all, from 1. Raises MalformedPayload."""
        if len(payload) != self._layout.size:
            raise MalformedPayload(f"{len(payload)} bytes beside a token, where {self._layout.size} were asked for")
        numbers = self._layout.unpack(payload)
        end = 2 + 2 * self._top
        pairs = list(zip(numbers[2:end:2], map(finite, numbers[3:end:2]), strict=True))
        if self._ids:
            found = {token_id for token_id, _ in pairs}
            named = zip(self._ids, numbers[end:], strict=True)
            pairs += [(one, finite(logprob)) for one, logprob in dict(named).items() if one not in found]
        return finite(numbers[0]), numbers[1], pairs


def finite(logprob: float) -> float:
    """A number that JSON has: neither infinities nor NaN."""
    return logprob if UNLIKELIEST < logprob <= -UNLIKELIEST else UNLIKELIEST
