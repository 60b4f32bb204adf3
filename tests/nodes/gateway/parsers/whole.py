"""A whole answer, joined from events in the plainest way: what surfaces make of them is compared with it. Then the
same from the parts that surfaces are given."""

from collections.abc import Iterable
from typing import NamedTuple

from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.jobs.answer_parts import parts_of
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, End, Event, Mark, Reasoning, Text


class Call(NamedTuple):
    """A whole call: `arguments` is a JSON object's text."""

    name: str
    arguments: str


class Answer(NamedTuple):
    """An answer that is not streamed."""

    text: str
    reasoning: str
    calls: list[Call]


def whole_answer(events: Iterable[Event]) -> Answer:
    """Joins events. A call that is not whole goes into the text as it was written, with its marks."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    sources: dict[int, list[str]] = {}
    for event in events:
        match event:
            case Text(piece):
                text.append(piece)
            case Reasoning(piece):
                reasoning.append(piece)
            case CallBegin(index, name, source):
                names[index], arguments[index], sources[index] = name, [], [source]
            case CallArguments(index, piece, source):
                arguments[index].append(piece)
                sources[index].append(source)
            case CallEnd(index, True, _):
                calls.append(Call(names[index], "".join(arguments[index])))
            case CallEnd(index, _, source):
                text += [*sources[index], source]
            case Mark() | End():
                pass
    return Answer("".join(text), "".join(reasoning), calls)


def joined(events: Iterable[Event]) -> Answer:
    """The parts that surfaces make an answer of. Texts of calls that are not whole are parts of their own."""
    parts = parts_of(events)
    text, reasoning = ("".join(part.text for part in parts if part.kind is kind) for kind in (Text, Reasoning))
    return Answer(
        text, reasoning, [Call(part.name, part.text) for part in parts if part.kind is CallBegin and part.whole]
    )


def read_whole(answers: Answers, text: str) -> Answer:
    """The first sample, from its text."""
    sample = answers.samples[0]
    return joined([*sample.feed(text), *sample.close()])
