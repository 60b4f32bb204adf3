"""One sample's parser: reasoning first, then calls in what is left."""

from nodes.gateway.parsers.events import END, Event, Text
from nodes.gateway.parsers.stage import Parser
from nodes.gateway.parsers.thinking import Thinking


class AnswerParser:
    """Text in, events out; `close` ends with `End`. Neither part is needed."""

    def __init__(self, reasoning: Parser | None, calls: Parser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Event]:
        """The events that are certain with this text, of which the first part may have come earlier."""
        if not self._reasoning or (isinstance(self._reasoning, Thinking) and self._reasoning.ended):
            if self._calls:
                return self._calls.feed(text)
            return [Text(text)] if text else []
        return self._through_calls(self._reasoning.feed(text))

    def close(self) -> list[Event]:
        """What was held back, and `End`. Called once."""
        events = self._through_calls(self._reasoning.close()) if self._reasoning else []
        return [*events, *(self._calls.close() if self._calls else ()), END]

    def _through_calls(self, events: list[Event]) -> list[Event]:
        if not self._calls:
            return events
        through: list[Event] = []
        for event in events:
            through += self._calls.feed(event.text) if isinstance(event, Text) else (event,)
        return through
