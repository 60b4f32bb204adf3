"""`prompt_logprobs`, and `echo` with `logprobs`: how likely each token of the prompt was after those before it.

Of the model's own distribution, whatever is drawn from. A worker's payload for each position of the prompt but the
first is that of `Logprobs` for a drawn token, without named ids.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta
from typing_extensions import override

from nodes.asks.ask import Ask, AskLimits, Fields, InvalidAsk
from nodes.asks.edits import MAX_TOP, RowReads

_PARAM = "prompt_logprobs"
_FIELDS: Fields = {_PARAM: Annotated[int, Meta(ge=0, le=MAX_TOP)]}


class PromptLogprobs(Ask, frozen=True):
    """Read each of the prompt's tokens, and the `top` most likely ones in its place."""

    top: int = 0

    name: ClassVar[str] = "prompt_logprobs/1"
    reads_prompt: ClassVar[bool] = True
    chat_fields: ClassVar[Fields] = _FIELDS
    text_fields: ClassVar[Fields] = {**_FIELDS, "echo": bool}

    @classmethod
    @override
    def read(cls, body: Mapping[str, Any], limits: AskLimits) -> Self | None:
        top: int | None = body[_PARAM]
        if top is not None and body.get("stream"):
            # As at vLLM: chunks have no place for it. An echo shows the same in its `logprobs`.
            raise InvalidAsk(f"'{_PARAM}' is not available when 'stream' is true.", _PARAM)
        # `logprobs` is a number where there is an echo.
        echoed: int | None = body["logprobs"] if body.get("echo") else None
        asked = [one for one in (top, echoed) if one is not None]
        return cls(max(asked)) if asked else None

    @override
    def reads_of_prompt(self) -> RowReads:
        return RowReads(self.top)
