"""A step as a runner gets it, and what a runner gives back. The seam between `core` and the runners."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, overload, runtime_checkable

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

    `row` is its index in the plan, offsets are into the step's arrays. With `draws` its last token draws the next one.
    `from_row` >= 0 only for a `PipelinedRunner`: the single input token is the one that this row of the plan launched
    just before drew; the host does not know it, and `token_ids` holds -1 for it. `history` holds the sequence's tokens
    at positions `0 .. end - 1`, if its draws look back.
    """

    row: int
    sequence: OpenSequence
    start: int
    num_tokens: int
    token_offset: int
    page_offset: int
    draws: int = 1
    from_row: int = -1
    history: "array[int] | None" = None

    @property
    def end(self) -> int:
        """How many positions are in the pages once the row has run."""
        return self.start + self.num_tokens

    @property
    def output_position(self) -> int:
        """Output position of the token that the row draws: the counter of its randomness."""
        return self.start + self.num_tokens - self.sequence.num_prompt_tokens

    @property
    def sampling(self) -> Sampling | None:
        """How it draws, if it does."""
        return self.sequence.sampling if self.draws else None


class Rows(Sequence[RunnableRow]):
    """The rows of a step by column, each as in `RunnableRow`. Backends read columns; a row is made when asked for.

    Objects for 256 rows and their draws took 100 us of a step.
    """

    __slots__ = (
        "counts",
        "draws",
        "found",
        "histories",
        "is_whole",
        "numbers",
        "page_offsets",
        "sources",
        "starts",
        "token_offsets",
    )  # fmt: skip

    def __init__(
        self,
        found: Sequence[OpenSequence],
        starts: Sequence[int],
        counts: Sequence[int],
        token_offsets: Sequence[int],
        page_offsets: Sequence[int],
        draws: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
        histories: "Sequence[array[int] | None] | None" = None,
    ) -> None:
        """By default all rows of a plan, in its order, which all draw and whose inputs are known."""
        num_rows = len(found)
        # Known to be so, without a look at each row.
        self.is_whole = draws is None
        self.found, self.starts, self.counts = found, starts, counts
        self.token_offsets, self.page_offsets = token_offsets, page_offsets
        self.draws = [1] * num_rows if draws is None else draws
        self.sources = [-1] * num_rows if sources is None else sources
        self.histories = [None] * num_rows if histories is None else histories
        self.numbers: Sequence[int] = range(num_rows)

    @classmethod
    def of(cls, rows: Sequence[RunnableRow]) -> "Rows":
        """These rows, in this order."""
        made = cls((), (), (), (), (), ())
        for column, field in _COLUMNS.items():
            setattr(made, column, [getattr(row, field) for row in rows])
        return made

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[RunnableRow]:
        return map(RunnableRow, *self._columns())

    @overload
    def __getitem__(self, index: int) -> RunnableRow: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "RunnableRow | Rows":
        if isinstance(index, int):
            return RunnableRow(*[column[index] for column in self._columns()])
        return self.picked(range(len(self))[index])

    def picked(self, indices: Sequence[int]) -> "Rows":
        """Some of the rows, in this order."""
        rows = self.of(())
        for name, column in zip(_COLUMNS, self._columns(), strict=True):
            setattr(rows, name, [column[index] for index in indices])
        return rows

    def drawing(self) -> Sequence[int]:
        """The indices of the rows that draw."""
        return range(len(self)) if self.is_whole else [index for index, one in enumerate(self.draws) if one]

    def _columns(self) -> list[Sequence[Any]]:
        return [getattr(self, column) for column in _COLUMNS]


_COLUMNS: Final = {
    "numbers": "row", "found": "sequence", "starts": "start", "counts": "num_tokens", "token_offsets": "token_offset",
    "page_offsets": "page_offset", "draws": "draws", "sources": "from_row", "histories": "history",
}  # fmt: skip
"""Columns of `Rows`, and the fields of `RunnableRow` that they hold, in its order."""
NO_ROWS: Final = Rows.of(())


class RunnableStep(NamedTuple):
    """Rows that can be computed. `token_ids` and `page_ids` are the plan's, int32, with all placeholders filled.

    The step counts as hung if it has not ended `timeout_s` after its turn came.
    """

    step: int
    rows: Rows
    token_ids: "array[int]"
    page_ids: "array[int]"
    timeout_s: float = 60.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows; `token_ids` also holds those of rows that cannot be computed."""
        return sum(self.rows.counts)


class StepOutcome(NamedTuple):
    """`token_ids[i]` is what `rows[i]` of the step drew, -1 for nothing. `delay_s`: how long to hold the answer back.

    `extras[i]` goes beside `token_ids[i]` (`StepResult.extras`); empty if no row has one. `prompt_extras[i]` is what
    was read of the prompt of `rows[i]` (`StepResult.prompt_extras`), `vectors[i]` the vector that it made, or what it
    has pooled so far (`StepResult.vectors`).

    `failure`: the traceback if the step raised and its rows were run one by one; else empty.
    """

    token_ids: Sequence[int]
    errors: Sequence[RowError] = ()
    delay_s: float = 0.0
    failure: str = ""
    extras: Sequence[bytes] = ()
    prompt_extras: Sequence[bytes] = ()
    vectors: Sequence[bytes] = ()


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
    token_ids, kept = step.token_ids[:], list[int]()
    errors: list[RowError] = []
    for index, row in enumerate(step.rows):
        token_id = drawn.get(row.from_row, -1)
        if row.from_row >= 0 and token_id < 0:
            errors.append(missing_input(row))
            continue
        if row.from_row >= 0:
            token_ids[row.token_offset] = token_id
        kept.append(index)
    rows = step.rows.picked(kept)
    rows.sources = [-1] * len(kept)
    return step._replace(rows=rows, token_ids=token_ids), errors


def missing_input(row: RunnableRow) -> RowError:
    """The error of a row whose `from_row` drew nothing."""
    return RowError(row.row, MISSING_INPUT, f"row {row.from_row} of the previous step drew no token")


def outcome_of(step: RunnableStep, part: RunnableStep, outcome: StepOutcome, errors: Sequence[RowError]) -> StepOutcome:
    """The outcome of `step` if only its `part` was run, which gave `outcome`, and the rest gave `errors`."""
    found = dict(zip(part.rows.numbers, outcome.token_ids, strict=True))
    token_ids = [found.get(number, -1) for number in step.rows.numbers]
    columns = (outcome.extras, outcome.prompt_extras, outcome.vectors)
    beside = [spread(some, part.rows.numbers, step.rows.numbers) for some in columns]
    return StepOutcome(token_ids, [*errors, *outcome.errors], outcome.delay_s, outcome.failure, *beside)


def spread(extras: Sequence[bytes], numbers: Sequence[int], among: Sequence[int]) -> list[bytes]:
    """`extras` of the rows `numbers` as those of the rows `among`; empty if there are none."""
    if not extras:
        return []
    beside = dict(zip(numbers, extras, strict=True))
    return [beside.get(number, b"") for number in among]
