"""Finds out which row of a step that raised is to blame, or whether the device is.

    step raises        its rows are run one by one: those that raise fail, the others get their tokens
    every row raises   one token is computed on page 0, which no sequence has. If that raises too, no request is to
                       blame: `DeviceFailed`, and the worker ends. Without this a broken device would fail every
                       request as `poisoned_request`, and count as healthy

Logits that are not finite raise nothing, so they never count here: only the row itself can cause them, no other row.
Steps are idempotent, so rows that had already written their pages write the same again.
"""

import traceback
from array import array
from typing import Final

from nodes.protocol import RowError
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.errors import CollectiveFailed, DeviceFailed
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import POISONED, Rows, RunnableRow, RunnableStep, Runner, StepOutcome

_PADDING_PAGE: Final = 0
_MAX_TRACEBACK: Final = 8_000
"""Characters of a traceback that are kept, from its end, which names the error. torch's can be of any length."""


def run_isolated(runner: Runner, step: RunnableStep) -> StepOutcome:
    """Run a step; if it raises, run its rows one by one, so that only the guilty ones fail (`poisoned_request`).

    Raises DeviceFailed if nothing can be computed, and CollectiveFailed, because a rank cannot run rows again that the
    other ranks do not run again.
    """
    try:
        return runner.run(step)
    except CollectiveFailed:
        raise
    except Exception as error:  # noqa: BLE001 # supervision boundary: whatever one request provokes must not end the batch
        failure = traceback_of(error)
        # No other row can be to blame, and running this one again would only raise again.
        if len(step.rows) == 1:
            outcome = StepOutcome([-1], [_blamed(step.rows[0], error)], 0.0, failure)
            _check_device(runner, step)
            return outcome
    return _row_by_row(runner, step, failure)


def traceback_of(error: BaseException) -> str:
    """The traceback and message of `error`; only the end of it if it is long."""
    return "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]


def _row_by_row(runner: Runner, step: RunnableStep, failure: str) -> StepOutcome:
    token_ids: list[int] = []
    errors: list[RowError] = []
    extras: list[bytes] = []
    prompt_extras: list[bytes] = []
    vectors: list[bytes] = []
    delay_s, num_raised = 0.0, 0
    for index, row in enumerate(step.rows):
        try:
            outcome = runner.run(step._replace(rows=step.rows[index : index + 1]))
        except CollectiveFailed:
            raise
        except Exception as error:  # noqa: BLE001 # as above
            num_raised += 1
            outcome = StepOutcome([-1], [_blamed(row, error)])
        token_ids.extend(outcome.token_ids)
        errors.extend(outcome.errors)
        extras.extend(outcome.extras or [b""])
        prompt_extras.extend(outcome.prompt_extras or [b""])
        vectors.extend(outcome.vectors or [b""])
        delay_s += outcome.delay_s
    # One row that succeeded shows that the device works, so the other rows are to blame for their failures.
    if num_raised == len(step.rows):
        _check_device(runner, step)
    beside = [some if any(some) else () for some in (extras, prompt_extras, vectors)]
    return StepOutcome(token_ids, errors, delay_s, failure, *beside)


def _blamed(row: RunnableRow, error: Exception) -> RowError:
    return RowError(row.row, POISONED, f"{type(error).__name__}: {error}"[:500], retryable=False)


def _check_device(runner: Runner, step: RunnableStep) -> None:
    """Compute a token of no request. Raises DeviceFailed if that fails too."""
    # Page 0 is padding: nobody reads what is written there.
    nobody = OpenSequence(Open(0, 0, 1, Sampling(temperature=0.0)))
    probe = RunnableStep(step.step, Rows([nobody], [0], [1], [0], [0]), array("i", [0]), array("i", [_PADDING_PAGE]))
    try:
        runner.run(probe)
    except Exception as error:
        # Whatever the runner raises for a token of nobody's: the device, not a request, is to blame.
        raise DeviceFailed(
            f"no row of step {step.step} could be computed, nor a test token that belongs to no request "
            f"({type(error).__name__}: {error}): see the traceback, and the device's own log"
        ) from error
