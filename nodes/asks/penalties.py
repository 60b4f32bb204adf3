"""`presence_penalty`, `frequency_penalty`: tokens that occur in the output become less likely, as at OpenAI."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields
from nodes.asks.edits import Editor, RowEdits

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_FIELDS = {"presence_penalty": _Penalty, "frequency_penalty": _Penalty}


class Penalties(Ask, frozen=True):
    """Subtracted from the logit of each token in the output: `presence` once, `frequency` each time it occurs."""

    presence: float = 0.0
    frequency: float = 0.0

    name: ClassVar[str] = "penalties/1"
    looks_back: ClassVar[bool] = True
    chat_fields: ClassVar[Fields] = _FIELDS
    text_fields: ClassVar[Fields] = _FIELDS

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        presence, frequency = body["presence_penalty"] or 0.0, body["frequency_penalty"] or 0.0
        return cls(presence, frequency) if presence or frequency else None

    @override
    def editor(self, model: DrawnModel) -> Editor:
        return _Occurring(self.presence, self.frequency)


class _Occurring:
    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._counts: Counter[int] = Counter()
        self._add: dict[int, float] = {}
        self._num_counted = 0

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        # Only what is new, and from the counts rather than by adding up: no order of calls changes a bit.
        if position < self._num_counted:
            self._counts, self._add, self._num_counted = Counter(), {}, 0
        new = history[len(history) - (position - self._num_counted) :] if position > self._num_counted else ()
        self._counts.update(new)
        self._num_counted = position
        for token_id in new:
            self._add[token_id] = -self._presence - self._frequency * self._counts[token_id]
        for token_id, value in self._add.items():
            edits.add[token_id] = edits.add.get(token_id, 0.0) + value
