"""A step as a runner gets it, and what a runner gives back. The seam between `core` and the runners."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast, overload, runtime_checkable

from kvstore.pool.page_pool import PagePool
from nodes.protocol import RowError
from nodes.request import Sampling
from nodes.worker.steps.sequence_table import OpenSequence

if TYPE_CHECKING:
    from array import array

POISONED: Final = "poisoned_request"
CORRUPT_PAGE: Final = "corrupt_page"
MISSING_INPUT: Final = "missing_input"


class RunnableRow(NamedTuple):
    """One row whose input tokens are known, or drawn by the step before.

    `row` is its index in the plan, offsets are into the step's arrays. `from_row` >= 0 only for a `PipelinedRunner`:
    the single input token is the one that this row of the plan launched just before drew; the host does not know it,
    and `token_ids` holds -1 for it. `request_id` is for the log. `history` holds the sequence's tokens at positions
    `0 .. end - 1`, if its sampling looks back.
    """

    row: int
    start: int
    num_tokens: int
    num_prompt_tokens: int
    token_offset: int
    page_offset: int
    num_pages: int
    sampling: Sampling | None
    from_row: int = -1
    request_id: str = ""
    history: "array[int] | None" = None

    @property
    def end(self) -> int:
        """How many positions are in the pages once the row has run."""
        return self.start + self.num_tokens

    @property
    def output_position(self) -> int:
        """Output position of the token that the row draws: the counter of its randomness."""
        return self.start + self.num_tokens - self.num_prompt_tokens


def rows_from(fields: Iterable[tuple[Any, ...]]) -> list[RunnableRow]:
    """Rows from tuples of all their fields, in order: 2.4 times as fast as calling `RunnableRow` hundreds of times."""
    make = cast("Callable[[type[RunnableRow], tuple[Any, ...]], RunnableRow]", getattr(tuple, "__new__"))  # noqa: B009
    return list(map(make, repeat(RunnableRow), fields))


class RowColumns(Sequence[RunnableRow]):
    """All rows of a plan by column, in its order; each draws, its inputs are known, its sampling does not look back.

    Runners that want rows get them, made on first use; native kernels read the columns.
    Row i is of `found[i]`: `counts[i]` tokens at positions from `starts[i]` on, in the step's token ids from
    `token_offsets[i]` on; its sequence's pages are in the step's page ids from `page_offsets[i]` on.
    """

    __slots__ = ("_made", "_page_size", "counts", "found", "page_offsets", "starts", "token_offsets")

    def __init__(
        self,
        found: list[OpenSequence],
        starts: list[int],
        counts: list[int],
        token_offsets: Sequence[int],
        page_offsets: list[int],
        page_size: int,
    ) -> None:
        self.found = found
        self.starts, self.counts = starts, counts
        self.token_offsets, self.page_offsets = token_offsets, page_offsets
        self._page_size = page_size
        self._made: list[RunnableRow] | None = None

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[RunnableRow]:
        return iter(self._rows())

    @overload
    def __getitem__(self, index: int) -> RunnableRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[RunnableRow]: ...

    def __getitem__(self, index: int | slice) -> RunnableRow | list[RunnableRow]:
        return self._rows()[index]

    def _rows(self) -> list[RunnableRow]:
        if self._made is None:
            # The same objects each time: callers ask for several rows, and compare some by identity.
            size = self._page_size
            fields = zip(
                range(len(self.found)),
                self.starts,
                self.counts,
                [one.num_prompt_tokens for one in self.found],
                self.token_offsets,
                self.page_offsets,
                [-(-(start + count) // size) for start, count in zip(self.starts, self.counts, strict=True)],
                [one.sampling for one in self.found],
                repeat(-1),
                [one.request_id for one in self.found],
                repeat(None),
            )
            self._made = rows_from(fields)
        return self._made


class RunnableStep(NamedTuple):
    """Rows that can be computed. `token_ids` and `page_ids` are the plan's, int32, with all placeholders filled.

    The step counts as hung if it has not ended `timeout_s` after its turn came.
    """

    step: int
    rows: Sequence[RunnableRow]
    token_ids: "array[int]"
    page_ids: "array[int]"
    timeout_s: float = 60.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows; `token_ids` also holds those of rows that cannot be computed."""
        rows = self.rows
        return sum(rows.counts if isinstance(rows, RowColumns) else [row.num_tokens for row in rows])


class StepOutcome(NamedTuple):
    """`token_ids[i]` is what `rows[i]` of the step drew, -1 for nothing. `delay_s`: how long to hold the answer back.

    `extras[i]` goes beside `token_ids[i]` (`StepResult.extras`); empty if no row has one.

    `failure`: the traceback if the step raised and its rows were run one by one; else empty.
    """

    token_ids: Sequence[int]
    errors: Sequence[RowError] = ()
    delay_s: float = 0.0
    failure: str = ""
    extras: Sequence[bytes] = ()


def drawn_outcome(step: RunnableStep, sampling: Sequence[int], drawn: Sequence[int]) -> StepOutcome:
    """The outcome of a step whose rows at the indices `sampling` drew `drawn`, -1 if logits were not finite."""
    if len(drawn) == len(step.rows) and min(drawn) >= 0:
        # All rows draw, and all have drawn, as in decoding. Row by row it would take 25 us for 256.
        return StepOutcome(drawn)
    token_ids = [-1] * len(step.rows)
    errors: list[RowError] = []
    for index, token_id in zip(sampling, drawn, strict=True):
        token_ids[index] = token_id
        if token_id < 0:
            # Only a row's own input can make its numbers overflow: rows do not mix.
            errors.append(RowError(step.rows[index].row, POISONED, "the model's logits are not finite"))
    return StepOutcome(token_ids, errors)


class Runner(Protocol):
    """A model over a KV pool. Synchronous; called from one thread, one step after the other.

    Running a step again writes the same bits to the same pages and draws the same tokens.
    """

    numerics: str
    """Fingerprint of everything that bits depend on; equal for two workers exactly if their bits are equal."""

    def run(self, step: RunnableStep) -> StepOutcome:
        """Write KV of all rows, draw tokens for those that sample. May raise for a step that cannot be computed."""
        ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner on a device that works on its own: a step may be launched before the one before has finished.

    Steps finish in the order in which they were launched; at most two are in flight.
    """

    def launch(self, step: RunnableStep) -> Any:
        """Queue a step on the device; the result is for `finish`. May raise, and has then launched nothing."""
        ...

    def finish(self, launched: Any) -> StepOutcome:
        """Wait for a launched step. May be called in another thread than `launch`. May raise if the device failed.

        When it returns, nothing of the step runs any more, whether it drew tokens or not: other processes then learn
        that its pages are written, and copy them on streams that wait for nothing.
        """
        ...

    def synchronize(self) -> None:
        """Wait until nothing runs on the device for this runner; its pages may be unmapped then. May raise."""
        ...


@runtime_checkable
class RemappableRunner(Runner, Protocol):
    """A runner that can give up its pool, and what depends on the pool's addresses, and keep its weights."""

    def unmap(self, *, backs_up: bool) -> None:
        """Forget the pool; nothing runs. `backs_up`: release the weights too, with a copy in the host's memory.

        What is forgotten is freed when this returns. May raise; the runner is then unusable.
        """
        ...

    def remap(self, pool: PagePool) -> None:
        """Compute over `pool`, with the same weights. May raise; the runner is then unusable."""
        ...


def with_inputs(step: RunnableStep, drawn: Mapping[int, int]) -> tuple[RunnableStep, list[RowError]]:
    """`step` with the inputs that it was to take from the device, once the step before has `drawn` them.

    `drawn` holds tokens by row of the previous plan; rows whose input was not drawn are left out (`missing_input`).
    """
    token_ids = step.token_ids[:]
    rows: list[RunnableRow] = []
    errors: list[RowError] = []
    for row in step.rows:
        if row.from_row >= 0:
            token_id = drawn.get(row.from_row, -1)
            if token_id < 0:
                errors.append(
                    RowError(row.row, MISSING_INPUT, f"row {row.from_row} of the previous step drew no token")
                )
                continue
            token_ids[row.token_offset] = token_id
        rows.append(row._replace(from_row=-1))
    return step._replace(rows=rows, token_ids=token_ids), errors


def outcome_of(step: RunnableStep, part: RunnableStep, outcome: StepOutcome, errors: Sequence[RowError]) -> StepOutcome:
    """The outcome of `step` if only its `part` was run, which gave `outcome`, and the rest gave `errors`."""
    found = {row.row: token_id for row, token_id in zip(part.rows, outcome.token_ids, strict=True)}
    token_ids = [found.get(row.row, -1) for row in step.rows]
    extras: Sequence[bytes] = ()
    if outcome.extras:
        beside = {row.row: extra for row, extra in zip(part.rows, outcome.extras, strict=True)}
        extras = [beside.get(row.row, b"") for row in step.rows]
    return outcome._replace(token_ids=token_ids, errors=[*errors, *outcome.errors], extras=extras)
