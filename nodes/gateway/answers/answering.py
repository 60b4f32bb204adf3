"""What a surface has in order to answer one call. Made by `calls/completions.py`."""

from typing import Generic, NamedTuple

from nodes.gateway.answers.responses import Head
from nodes.gateway.answers.token_details import TokenDetails
from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.jobs.validation import Job, Own
from nodes.gateway.parsers.events import Event, Text
from nodes.gateway.requests.outputs import Generation, Piece


class Answering(NamedTuple, Generic[Own]):
    """All that an answer is made of. `answers` None: texts are shown as they come."""

    head: Head
    job: Job[Own]
    generation: Generation
    details: TokenDetails
    answers: Answers | None = None

    def events(self, piece: Piece) -> list[Event]:
        """Those of the whole answer of a sample that has ended, whose only piece this is."""
        if self.answers is None:
            return [Text(piece.text)] if piece.text else []
        sample = self.answers.samples[piece.number]
        return [*sample.feed(piece.text), *sample.close()]

    def call_id(self, number: int, index: int) -> str:
        """The id of a call of a sample; there are none without `answers`."""
        assert self.answers is not None, "texts that are not taken apart have no calls"
        return self.answers.call_id(number, index)

    def num_calls(self, number: int) -> int:
        """Whole calls of tools in a sample so far."""
        return 0 if self.answers is None else self.answers.samples[number].num_calls
