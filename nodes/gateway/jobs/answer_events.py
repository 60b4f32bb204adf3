"""What surfaces show of an answer: the events of its parser (`parsers/events.py`) as the call wants them. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Literal, NamedTuple

from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.parsers import AnswerParser, OfferedTools, make_parser
from nodes.gateway.parsers.call_ids import call_id
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, End, Event, Mark, Reasoning, Text

_REASONING_MARKS: Final = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})


class AnswerFields(NamedTuple):
    """How an answer is taken apart; only those of chats are.

    `tools` are those that may be called; with `one_call` at most one is. `reasoning` is shown by itself, as the text
    that it is, or not at all; without `streams_reasoning` in one piece.
    """

    is_chat: bool = False
    tools: OfferedTools = {}
    one_call: bool = False
    reasoning: Literal["apart", "text", "hidden"] = "apart"
    streams_reasoning: bool = True


class SampleEvents:
    """One sample's events. A call that was begun and is not whole is followed by its text, so that nothing is lost.

    `num_calls` that were whole so far.
    """

    def __init__(self, parser: AnswerParser, fields: AnswerFields) -> None:
        self.num_calls = 0
        self._num_chars = self._num_reasoning_chars = 0
        self._parser = parser
        self._fields = fields
        self._held: list[str] = []
        self._sources: list[str] = []
        self._is_passed_over = False

    @property
    def reasoning_share(self) -> float:
        """Of all that was said so far, whether it is shown or not."""
        return self._num_reasoning_chars / max(1, self._num_chars)

    def feed(self, text: str) -> list[Event]:
        """What is certain with this text."""
        return self._shown(self._parser.feed(text)) if text else []

    def close(self) -> list[Event]:
        """The rest. Called once, when the sample has ended."""
        return self._shown(self._parser.close())

    def _shown(self, events: list[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            self._num_chars += len(event.source)
            match event:
                case Reasoning(text):
                    self._num_reasoning_chars += len(text)
                    shown += self._reasoning(text)
                    continue
                case Mark(source):
                    # Marks of calls stay hidden: those who want reasoning as text read the marks around it themselves.
                    is_text = self._fields.reasoning == "text" and source.strip() in _REASONING_MARKS
                    shown.append(Text(source) if is_text else event)
                    continue
                case _:
                    pass
            # Whatever follows reasoning ends it: clients that want one piece want it before the answer.
            if self._held:
                shown.append(Reasoning("".join(self._held)))
                self._held = []
            if isinstance(event, Text):
                shown.append(event)
            elif not isinstance(event, End):
                shown += self._call(event)
        return shown

    def _reasoning(self, text: str) -> list[Event]:
        fields = self._fields
        if fields.reasoning == "text":
            return [Text(text)]
        if fields.reasoning == "hidden":
            return []
        if fields.streams_reasoning:
            return [Reasoning(text)]
        self._held.append(text)
        return []

    def _call(self, event: CallBegin | CallArguments | CallEnd) -> list[Event]:
        if isinstance(event, CallBegin):
            # Of whole ones: after a call that came to nothing the next one is still the first.
            self._is_passed_over = self._fields.one_call and self.num_calls > 0
            self._sources = []
        if self._is_passed_over:
            return []
        self._sources.append(event.source)
        if not isinstance(event, CallEnd):
            return [event]
        if event.whole:
            self.num_calls += 1
            return [event]
        # Its deltas are out already, and cannot be taken back.
        return [event, Text("".join(self._sources))]


class Answers:
    """The samples of one call, by number."""

    def __init__(self, form: AnswerForm, fields: AnswerFields, prompt_tail: str, request_ids: Sequence[str]) -> None:
        """Raises ParserUnusable."""
        self.samples = [SampleEvents(make_parser(form.names, prompt_tail, fields.tools), fields) for _ in request_ids]
        self._request_ids = request_ids
        self._short_ids = form.short_ids

    def call_id(self, number: int, index: int) -> str:
        """The id of a call of a sample: the same however often the answer is made again."""
        return call_id(self._request_ids[number], index, short=self._short_ids)


def merged(events: Sequence[Event]) -> Iterable[Event]:
    """Pieces of one thing after each other as one piece, and no empty ones: a loop turn may bring many. No marks."""
    # Most often it brings one.
    is_one = len(events) == 1 and isinstance(events[0], Text | Reasoning) and events[0].text
    return events if is_one else _merged(events)


def _merged(events: Sequence[Event]) -> Iterator[Event]:
    for (kind, index), several in groupby(events, lambda event: (type(event), getattr(event, "call_index", -1))):
        if kind is Text or kind is Reasoning:
            text = "".join(event.source for event in several)
            if text:
                yield Text(text) if kind is Text else Reasoning(text)
        elif kind is CallArguments:
            pieces = [event for event in several if isinstance(event, CallArguments)]
            text = "".join(event.text for event in pieces)
            if text:
                yield CallArguments(index, text, "".join(event.source for event in pieces))
        elif kind is not Mark:
            yield from several
