"""`logit_bias`: a number added to the logits of some tokens, as at OpenAI."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, DrawnModel, Fields, InvalidAsk
from nodes.asks.edits import Editor, RowEdits
from nodes.request import MAX_TOKEN_ID

MAX_LOGIT_BIAS: Final = 1024
"""Added to a row's logits at every token, and sent again with each attempt: 1,024 pairs are about 10 KB."""
_PARAM: Final = "logit_bias"
_FIELDS = {_PARAM: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)]}


class LogitBias(Ask, frozen=True):
    """`bias` by token id."""

    bias: dict[int, float]

    name: ClassVar[str] = "logit_bias/1"
    chat_fields: ClassVar[Fields] = _FIELDS
    text_fields: ClassVar[Fields] = _FIELDS

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        if not body[_PARAM]:
            return None
        bias: dict[int, float] = {}
        for key, value in body[_PARAM].items():
            # `int()` also takes underscores, signs, spaces and other scripts' digits; "07" and "7" would be one id.
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))):
                raise InvalidAsk(f"Keys of '{_PARAM}' must be token ids, not {key[:40]!r}.", _PARAM)
            bias[int(key)] = value
        if max(bias) > MAX_TOKEN_ID:
            raise InvalidAsk(f"A token id in '{_PARAM}' is too large.", _PARAM)
        limits.check_ids(list(bias), _PARAM)
        return cls(bias)

    @override
    def editor(self, model: DrawnModel) -> Editor:
        return _Bias(self.bias)


class _Bias:
    def __init__(self, bias: dict[int, float]) -> None:
        self._bias = bias

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        edits.bias.update(self._bias)
