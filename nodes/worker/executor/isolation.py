"""A step that raises: which of its rows is to blame, or whether it is the device.

    step raises        its rows are run one by one: those that raise fail, the others have their tokens
    every row raises   one token is computed on page 0, which is nobody's. If that raises too it is no request's fault:
                       `DeviceFailed`, and the worker ends. Without this a broken device would fail every request as
                       `poisoned_request`, and count as healthy

Logits that are not finite raise nothing, so they never count: they are a row's own doing, whatever other rows do.
Steps are idempotent, so rows that had already written their pages write the same again.
"""

import traceback
from array import array
from typing import Final

from nodes.protocol import RowError
from nodes.request import Sampling
from nodes.worker.errors import CollectiveFailed, DeviceFailed
from nodes.worker.steps.step import POISONED, RunnableRow, RunnableStep, Runner, StepOutcome

_PADDING_PAGE: Final = 0
_MAX_TRACEBACK: Final = 8_000
"""Characters of a traceback that are kept, the last ones: what raised is at its end. torch's can be of any length."""


def run_isolated(runner: Runner, step: RunnableStep) -> StepOutcome:
    """Run a step; if it raises, run its rows one by one, so that only the guilty ones fail (`poisoned_request`).

    Raises DeviceFailed if nothing can be computed, and CollectiveFailed: what other ranks do not run again cannot be
    run again alone.
    """
    try:
        return runner.run(step)
    except CollectiveFailed:
        raise
    except Exception as error:  # noqa: BLE001 # supervision boundary: whatever one request provokes must not end the batch
        failure = traceback_of(error)
        # There is nobody else to blame, and running it again would only raise again.
        if len(step.rows) == 1:
            outcome = StepOutcome([-1], [_blamed(step.rows[0], error)], 0.0, failure)
            _check_device(runner, step)
            return outcome
    return _row_by_row(runner, step, failure)


def traceback_of(error: BaseException) -> str:
    """Where it was raised and what it says; the end of it, if it is long."""
    return "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]


def _row_by_row(runner: Runner, step: RunnableStep, failure: str) -> StepOutcome:
    token_ids: list[int] = []
    errors: list[RowError] = []
    extras: list[bytes] = []
    delay_s, num_raised = 0.0, 0
    for row in step.rows:
        try:
            outcome = runner.run(step._replace(rows=[row]))
        except CollectiveFailed:
            raise
        except Exception as error:  # noqa: BLE001 # as above
            num_raised += 1
            outcome = StepOutcome([-1], [_blamed(row, error)])
        token_ids.extend(outcome.token_ids)
        errors.extend(outcome.errors)
        extras.extend(outcome.extras or [b""])
        delay_s += outcome.delay_s
    # One that went well shows that the device works, so the others' failures are their own.
    if num_raised == len(step.rows):
        _check_device(runner, step)
    return StepOutcome(token_ids, errors, delay_s, failure, extras if any(extras) else ())


def _blamed(row: RunnableRow, error: Exception) -> RowError:
    return RowError(row.row, POISONED, f"{type(error).__name__}: {error}"[:500])


def _check_device(runner: Runner, step: RunnableStep) -> None:
    """Compute a token that is nobody's. Raises DeviceFailed if that cannot be done either."""
    # Page 0 is padding: what is written there is read by nobody.
    row = RunnableRow(0, 0, 1, 1, 0, 0, 1, Sampling(temperature=0.0))
    probe = RunnableStep(step.step, [row], array("i", [0]), array("i", [_PADDING_PAGE]))
    try:
        runner.run(probe)
    except Exception as error:
        raise DeviceFailed(
            f"no row of step {step.step} could be computed, nor a token that is nobody's "
            f"({type(error).__name__}: {error}): see the traceback, and the device's own log"
        ) from error
