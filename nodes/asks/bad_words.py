"""`bad_words`: texts whose tokens are not drawn one after the other, as in vLLM: each also with a space before it.

Only these tokens in this order are kept from the output: another spelling of the same text is not.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields
from nodes.asks.edits import Editor, RowEdits

_MAX_WORDS: Final = 256
"""Each is encoded twice by a tokenizer and compared with the end of the output at every token."""
_MAX_CHARS: Final = 128
"""A word, not a text: with 256 of them 64 KiB of characters for a tokenizer to encode on its event loop, twice."""
_PARAM: Final = "bad_words"
_Word = Annotated[str, Meta(min_length=1, max_length=_MAX_CHARS)]
_FIELDS = {_PARAM: Annotated[list[_Word], Meta(max_length=_MAX_WORDS)]}


class BadWords(Ask, frozen=True):
    """`token_ids`: of each word, and of each word with a space before it."""

    words: list[str] = []
    token_ids: list[list[int]] = []

    name: ClassVar[str] = "bad_words/1"
    looks_back: ClassVar[bool] = True
    chat_fields: ClassVar[Fields] = _FIELDS
    text_fields: ClassVar[Fields] = _FIELDS

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        words: list[str] = body[_PARAM] or []
        return cls(words) if words else None

    @override
    def texts(self) -> list[str]:
        return [text for word in self.words for text in (word, f" {word}")]

    @override
    def with_token_ids(self, token_ids: list[list[int]]) -> Self:
        return type(self)(token_ids=[ids for ids in token_ids if ids])

    @override
    def editor(self, model: DrawnModel) -> Editor:
        return _Unspoken(self.token_ids)


class _Unspoken:
    def __init__(self, token_ids: list[list[int]]) -> None:
        self._words = [(ids[:-1], ids[-1]) for ids in token_ids]

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        for before, last in self._words:
            size = len(before)
            # The output alone: a prompt may end in the beginning of a word.
            if size <= position and list(history[len(history) - size :]) == before:
                edits.forbid(last)
