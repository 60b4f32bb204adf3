"""Packs tokenised conversations into rows of one length, with a weight for every token.

Only what the assistant says has a weight. Called by the training script.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny_model.conversation import Example
from tools.tiny_model.tokenizer import END_OF_TEXT, TURN_END, TURN_START, render, token_id

SHORT_LENGTH: Final = 256
LONG_LENGTH: Final = 1024
POOL_SIZE: Final = 512


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of one conversation and the weight of predicting each."""

    tokens: list[int]
    weights: list[float]


@dataclass(slots=True)
class Row:
    """A row being filled."""

    length: int
    tokens: list[int] = field(default_factory=list[int])
    weights: list[float] = field(default_factory=list[float])
    documents: list[int] = field(default_factory=list[int])

    def add(self, document: Document) -> bool:
        """Append a document if there is room for it."""
        if len(self.tokens) + len(document.tokens) > self.length:
            return False
        number = self.documents[-1] + 1 if self.documents else 0
        self.tokens += document.tokens
        self.weights += document.weights
        self.documents += [number] * len(document.tokens)
        return True


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length: token ids, document numbers (-1 is padding) and weights."""

    tokens: Tensor
    documents: Tensor
    weights: Tensor


class Encoder:
    """Turns conversations into documents."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = [token_id(tokenizer, TURN_START), *tokenizer.encode("assistant\n").ids]
        self._end = token_id(tokenizer, TURN_END)
        self._end_of_text = token_id(tokenizer, END_OF_TEXT)

    def encode(self, example: Example) -> Document:
        """Encode a conversation with its answer.

        An answer of n tokens weighs the square root of n, so that long easy answers (counting)
        do not drown short hard ones (sums).
        """
        tokens = self._tokenizer.encode(render(example.messages, tools=example.tools, answer=example.answer)).ids
        tokens = [*tokens, self._end_of_text]
        weights = [0.0] * len(tokens)
        place = 0
        while place < len(tokens):
            if tokens[place : place + len(self._start)] != self._start:
                place += 1
                continue
            first = place + len(self._start)
            last = tokens.index(self._end, first)
            weight = (last + 1 - first) ** -0.5
            weights[first : last + 1] = [weight] * (last + 1 - first)
            place = last + 1
        return Document(tokens, weights)


def fill_rows(documents: Iterable[Document], length: int) -> list[Row]:
    """First-fit decreasing: few rows, each at most ``length`` tokens."""
    rows: list[Row] = []
    for document in sorted(documents, key=lambda d: len(d.tokens), reverse=True):
        if not any(row.add(document) for row in rows):
            row = Row(length)
            row.add(document)
            rows.append(row)
    return rows


def to_batch(rows: list[Row]) -> Batch:
    """Pad rows of one length to a batch."""

    def padded(values: list[int], row: Row, filler: int) -> list[int]:
        return values + [filler] * (row.length - len(values))

    return Batch(
        torch.tensor([padded(row.tokens, row, 0) for row in rows]),
        torch.tensor([padded(row.documents, row, -1) for row in rows]),
        torch.tensor([row.weights + [0.0] * (row.length - len(row.weights)) for row in rows]),
    )


class Packer:
    """An endless source of steps: one batch of short rows, and one of long rows when there are any."""

    def __init__(self, examples: Iterator[Example], encoder: Encoder, num_short_rows: int) -> None:
        self._examples = examples
        self._encoder = encoder
        self._num_short_rows = num_short_rows
        self._short: list[Row] = []
        self._long: list[Row] = []
        self._waiting: list[Document] = []
        self._rng = Random("rows")

    def step(self) -> list[Batch]:
        """The batches of one optimizer step."""
        while len(self._short) < self._num_short_rows:
            self._refill()
        short, self._short = self._short[: self._num_short_rows], self._short[self._num_short_rows :]
        share = max(1, len(self._short) // self._num_short_rows + 1)
        num_long = -(-len(self._long) // share)
        long, self._long = self._long[:num_long], self._long[num_long:]
        return [to_batch(rows) for rows in (short, long) if rows]

    def _refill(self) -> None:
        documents = [self._encoder.encode(example) for example in islice(self._examples, POOL_SIZE)]
        rows = fill_rows([d for d in documents if len(d.tokens) <= SHORT_LENGTH], SHORT_LENGTH)
        self._rng.shuffle(rows)  # rows come sorted by length, and so by family
        self._short += rows
        self._waiting += [d for d in documents if SHORT_LENGTH < len(d.tokens) <= LONG_LENGTH]
        if sum(len(d.tokens) for d in self._waiting) >= 4 * LONG_LENGTH:
            self._long += fill_rows(self._waiting, LONG_LENGTH)
            self._waiting = []
