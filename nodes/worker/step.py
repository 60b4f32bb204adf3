"""A step as a runner gets it, and what a runner gives back. The seam between `core` and the runners."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from nodes.protocol import RowError
from nodes.request import Sampling

if TYPE_CHECKING:
    from array import array

POISONED: Final = "poisoned_request"
CORRUPT_PAGE: Final = "corrupt_page"


class RunnableRow(NamedTuple):
    """One row whose input tokens are all known. `row` is its index in the plan, offsets are into the step's arrays.

    `from_row` >= 0 only for a `PipelinedRunner`: the one input token is what that row of the plan launched just before
    drew, and not known on the host; `token_ids` then holds -1 for it.
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

    @property
    def end(self) -> int:
        """Positions that are in the pages when the row has run."""
        return self.start + self.num_tokens

    @property
    def output_position(self) -> int:
        """Output position of the token that the row draws: the counter of its randomness."""
        return self.start + self.num_tokens - self.num_prompt_tokens


class RunnableStep(NamedTuple):
    """Rows that can be computed. `token_ids` and `page_ids` are the plan's, int32, with all placeholders filled."""

    step: int
    rows: Sequence[RunnableRow]
    token_ids: "array[int]"
    page_ids: "array[int]"


class StepOutcome(NamedTuple):
    """`token_ids[i]` is what `rows[i]` of the step drew, -1 for nothing. `delay_s`: hold the answer back so long."""

    token_ids: Sequence[int]
    errors: Sequence[RowError] = ()
    delay_s: float = 0.0


class Runner(Protocol):
    """A model over a KV pool. Synchronous; called from one thread, one step after the other.

    Running a step again writes the same bits to the same pages and draws the same tokens.
    """

    @property
    def numerics(self) -> str:
        """Fingerprint of everything that bits depend on; equal at two workers exactly if their bits are."""
        ...

    def run(self, step: RunnableStep) -> StepOutcome:
        """Write KV of all rows, draw tokens for those that sample. May raise for a step that cannot be computed."""
        ...


class PipelinedRunner(Runner, Protocol):
    """A runner on a device that works on its own: a step may be launched before the one before has finished.

    Steps finish in the order in which they were launched; at most two are on their way.
    """

    def launch(self, step: RunnableStep) -> Any:
        """Queue a step on the device; what comes back is for `finish`. May raise, and has then launched nothing."""
        ...

    def finish(self, launched: Any) -> StepOutcome:
        """Wait for a launched step. May be called in another thread than `launch`. May raise if the device failed."""
        ...


def run_isolated(runner: Runner, step: RunnableStep) -> StepOutcome:
    """Run a step; if it raises, run its rows one by one, so that only the guilty ones fail (`poisoned_request`).

    Steps are idempotent, so rows that had already written their pages write the same again.
    """
    try:
        return runner.run(step)
    except Exception as error:  # noqa: BLE001 # supervision boundary: whatever one request provokes must not end the batch
        if len(step.rows) == 1:
            return StepOutcome([-1], [RowError(step.rows[0].row, POISONED, f"{type(error).__name__}: {error}"[:500])])
    token_ids: list[int] = []
    errors: list[RowError] = []
    delay_s = 0.0
    for row in step.rows:
        outcome = run_isolated(runner, step._replace(rows=[row]))
        token_ids.extend(outcome.token_ids)
        errors.extend(outcome.errors)
        delay_s += outcome.delay_s
    return StepOutcome(token_ids, errors, delay_s)
