"""`allowed_token_ids`: only these are drawn, as in vLLM. The end ids are not among them unless they are listed."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields
from nodes.asks.edits import Editor, RowEdits, mask_of
from nodes.request import TokenId

_MAX_IDS: Final = 8192
"""An id takes up to five bytes in every attempt, so these are 40 of the 64 KiB that all asks of a request may take."""
_PARAM: Final = "allowed_token_ids"
_FIELDS = {_PARAM: Annotated[list[TokenId], Meta(min_length=1, max_length=_MAX_IDS)]}


class AllowedTokenIds(Ask, frozen=True):
    """`token_ids` are the only ones."""

    token_ids: list[int]

    name: ClassVar[str] = "allowed_token_ids/1"
    chat_fields: ClassVar[Fields] = _FIELDS
    text_fields: ClassVar[Fields] = _FIELDS

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        if body[_PARAM] is None:
            return None
        limits.check_ids(body[_PARAM], _PARAM)
        return cls(body[_PARAM])

    @override
    def editor(self, model: DrawnModel) -> Editor:
        return _Allowed(mask_of(self.token_ids, model.vocab_size))


class _Allowed:
    def __init__(self, mask: bytes) -> None:
        self._mask = mask

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        edits.allow(self._mask)
