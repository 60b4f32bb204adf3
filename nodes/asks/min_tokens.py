"""`min_tokens`: what would end the answer is not drawn among its first tokens.

The same number is in `StopRules`, by which the detokenizer lets stop strings within them pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel
from nodes.asks.edits import Editor, RowEdits


class MinTokens(Ask, frozen=True):
    """Neither the model's end ids nor `stop_token_ids` are drawn at output positions below `count`.

    End ids not even with `ignore_eos`, as in vLLM: that is about what ends an answer, and this about what is drawn.
    Where a grammar allows nothing else, they are drawn all the same.
    """

    count: int
    stop_token_ids: list[int] = []

    name: ClassVar[str] = "min_tokens/1"

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        return cls(body["min_tokens"], body["stop_token_ids"] or []) if body["min_tokens"] else None

    @override
    def editor(self, model: DrawnModel) -> Editor:
        return _NotYet(self.count, frozenset((*model.end_token_ids, *self.stop_token_ids)))


class _NotYet:
    def __init__(self, count: int, ids: frozenset[int]) -> None:
        self._count = count
        self._ids = ids

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        if position < self._count:
            edits.delay(self._ids)
