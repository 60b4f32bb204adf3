"""Which tokens a piece of a message is made of, where a parser cuts the text elsewhere than the model did. Pure."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterable
from typing import Final

from nodes.gateway.fields.openai_types import DrawnTokenLogprob
from nodes.gateway.parsers.events import Event

_DECODER: Final = getincrementaldecoder("utf-8")


class TokenAlignment:
    """Tokens are `add`ed before or with the events whose text they are; each event `take`s those that it has part of.

    Events are looked for in the tokens' text in their order: what is no part of the text, such as a special token or a
    blank at its beginning, is passed over.
    """

    def __init__(self) -> None:
        self._decoder = _DECODER("replace")
        self._text = ""
        # With the places in `_text` where they begin and end.
        self._tokens: deque[tuple[int, int, DrawnTokenLogprob]] = deque()

    def add(self, tokens: Iterable[DrawnTokenLogprob]) -> None:
        for token in tokens:
            begin = len(self._text)
            self._text += self._decoder.decode(bytes(token.bytes))
            self._tokens.append((begin, len(self._text), token))

    def take(self, event: Event) -> list[DrawnTokenLogprob]:
        """The tokens that are part of the event's text, and of none before it."""
        first = self._text.find(event.source)
        if first < 0:
            # Said twice, as the text of a call that went wrong is, or not by the model.
            return []
        last = first + len(event.source)
        taken: list[DrawnTokenLogprob] = []
        while self._tokens and self._tokens[0][0] < last:
            begin, end, token = self._tokens.popleft()
            if end > first or begin >= first:
                taken.append(token)
        self._text = self._text[last:]
        self._tokens = deque((begin - last, end - last, token) for begin, end, token in self._tokens)
        return taken
