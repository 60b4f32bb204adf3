"""`repetition_penalty`: tokens that occur in prompt or output become less likely, or more likely below 1.

As in transformers and vLLM (Keskar et al. 2019): positive logits are divided by it, negative ones multiplied.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields
from nodes.asks.edits import Editor, RowEdits
from nodes.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY

_FIELDS = {"repetition_penalty": Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]}


class RepetitionPenalty(Ask, frozen=True):
    """`penalty` 1 would change nothing, and is not sent."""

    penalty: float

    name: ClassVar[str] = "repetition_penalty/1"
    looks_back: ClassVar[bool] = True
    chat_fields: ClassVar[Fields] = _FIELDS
    text_fields: ClassVar[Fields] = _FIELDS

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        given = body["repetition_penalty"]
        penalty = limits.defaults.repetition_penalty if given is None else given
        return None if penalty == 1 else cls(penalty)

    @override
    def editor(self, model: DrawnModel) -> Editor:
        return _Repeated(self.penalty)


class _Repeated:
    def __init__(self, penalty: float) -> None:
        self._penalty = penalty
        self._scale: dict[int, float] = {}
        self._num_seen = 0

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        # Only what is new: a token of a long answer would else cost a pass over all tokens before it.
        if len(history) < self._num_seen:
            self._scale, self._num_seen = {}, 0
        self._scale.update(dict.fromkeys(history[self._num_seen :], self._penalty))
        self._num_seen = len(history)
        edits.scale.update(self._scale)
