"""From logits to a step's outcome, for every backend: edits, draws, what is read of probabilities, and errors.

    Draws(rows, places)   which rows draw, and how: their edits, so that a backend knows whether it must write logits.
                          Needs no logits: it is made before the model computes, or while a device does
    on_host               tokens and outcome at once, from logits on the CPU or a backend's own most likely tokens
    on_device, outcome    tokens stay on the device; the outcome follows when they have been copied

A row whose editors raise, or leave nothing to draw, fails alone: nothing is computed again for the others.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
from torch import Tensor

from nodes.protocol import RowError
from nodes.worker.draw.edits import LEFT_NOTHING, NOTHING_LEFT, edits_of
from nodes.worker.draw.measuring import measured, payloads
from nodes.worker.draw.sampler import NO_CANDIDATE, PLAIN, Draw, sample
from nodes.worker.steps.step import POISONED, Rows, StepOutcome

if TYPE_CHECKING:
    from array import array

    from nodes.asks.edits import RowReads


NOT_FINITE: Final = "the model's logits are not finite"


class HostRows(Protocol):
    """A backend's own way to draw from float32 logits on the host, and to read them."""

    def draw(
        self, logits: Tensor, altered: Mapping[int, Draw], reads: Mapping[int, "RowReads"], drawn: Sequence[int]
    ) -> tuple[Sequence[int], Tensor | None]:
        """All tokens, `drawn` but for the rows in `altered`, and a line for each row in `reads`, as `measured` has."""
        ...


class Draws:
    """How the rows of a step draw, in the order of `places`: the rows' indices, and the order of the logits."""

    __slots__ = ("_altered", "_failed", "_reads", "_rows", "places")

    def __init__(self, rows: Rows, places: Sequence[int] | None = None) -> None:
        """Asks the editors. By default `places` are the rows that draw, in their order."""
        self._rows = rows
        self.places = rows.drawing() if places is None else places
        self._altered: dict[int, Draw] = {}
        self._reads: dict[int, RowReads] = {}
        self._failed: dict[int, RowError] = {}
        found = rows.found
        # Usually most requests are plainly greedy, or none is: an object for each draw took 100 us at 256 rows.
        for at in [at for at, index in enumerate(self.places) if not found[index].is_plain]:
            index = self.places[at]
            one = found[index]
            edits = edits_of(rows[index]) if one.is_edited else None
            if isinstance(edits, RowError):
                self._failed[at] = edits
                continue
            draw = Draw(one.sampling, rows.starts[index] + rows.counts[index] - one.num_prompt_tokens, edits)
            if not draw.is_plain:
                self._altered[at] = draw
            if one.reads is not None:
                self._reads[at] = one.reads

    @property
    def wants_logits(self) -> bool:
        """Whether the most likely tokens of the unchanged logits are not enough."""
        return bool(self._altered or self._reads)

    def on_host(
        self, logits: Tensor | None, likely: "array[int] | None" = None, own: HostRows | None = None
    ) -> StepOutcome:
        """The outcome, from `[places, vocab]`; or from the `likely` tokens of each, and logits only if wanted.

        `own`: what draws from the rows that are not plainly greedy, and reads; else torch does.
        """
        if own is not None and likely is not None and self.wants_logits:
            assert logits is not None, "logits are wanted"
            return self.outcome(*own.draw(logits, self._altered, self._reads, likely))
        if likely is None:
            assert logits is not None, "without logits nothing is likely"
            drawn = _ids(sample(logits, self._every()))
        else:
            drawn = likely.tolist()
            if self._altered:
                assert logits is not None, "logits are wanted"
                altered = list(self._altered)
                rows = logits if len(altered) == len(drawn) else logits[altered]
                tokens = _ids(sample(rows, [*self._altered.values()]))
                for at, token in zip(altered, tokens, strict=True):
                    drawn[at] = token
        if not self._reads:
            return self.outcome(drawn)
        assert logits is not None, "logits are wanted"
        return self.outcome(drawn, self._measured(logits, torch.tensor(drawn)))

    def on_device(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens of `[places, vocab]`, int64 on its device, and what is read of it; for `outcome`."""
        tokens = sample(logits, self._every())
        return tokens, self._measured(logits, tokens) if self._reads else None

    def outcome(
        self, drawn: Sequence[int], lines: Tensor | None = None, failed: Mapping[int, RowError] | None = None
    ) -> StepOutcome:
        """The outcome of what `places` drew, and what was read, both on the host.

        `failed`: rows, by index, that could not be computed for other reasons.
        """
        rows = self._rows
        is_plain = len(drawn) == len(rows) and min(drawn) >= 0 and not (self._failed or self._reads or failed)
        every = range(len(rows))
        # Ranges compare by their ends; torch's engine may have put the rows in another order, in a list.
        if is_plain and (self.places == every or list(self.places) == list(every)):
            # All rows draw, and all have drawn, as in decoding, in their order. Row by row it would take 25 us for 256.
            return StepOutcome(drawn)
        token_ids, errors = [-1] * len(rows), dict(failed or {})
        for at, (index, token_id) in enumerate(zip(self.places, drawn, strict=True)):
            if index in errors:
                continue
            if at in self._failed:
                errors[index] = self._failed[at]
            elif token_id == NO_CANDIDATE:
                errors[index] = RowError(rows.numbers[index], NOTHING_LEFT, LEFT_NOTHING, retryable=False)
            elif token_id < 0:
                # Only a row's own input can make its numbers overflow: rows do not mix.
                errors[index] = RowError(rows.numbers[index], POISONED, NOT_FINITE, retryable=False)
            else:
                token_ids[index] = token_id
        extras: list[bytes] = []
        if lines is not None:
            extras = [b""] * len(rows)
            for at, extra in zip(self._reads, payloads(lines, [*self._reads.values()]), strict=True):
                index = self.places[at]
                extras[index] = extra if token_ids[index] >= 0 else b""
        return StepOutcome(token_ids, [*errors.values()], extras=extras)

    def _every(self) -> list[Draw]:
        return [self._altered.get(at, PLAIN) for at in range(len(self.places))]

    def _measured(self, logits: Tensor, tokens: Tensor) -> Tensor:
        which = torch.tensor([*self._reads], device=logits.device)
        draws = [self._altered.get(at, PLAIN) for at in self._reads]
        return measured(logits[which], tokens[which], draws, [*self._reads.values()])


def _ids(tokens: Tensor) -> list[int]:
    return cast("list[int]", tokens.tolist())
