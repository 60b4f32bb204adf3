"""Keeps a device busy: launches a step while the one before runs, and waits for each in its turn.

Two threads: one launches, which is work for the host, the other waits for the device. If launching a step raises, the
step is run row by row, as everywhere (`run_isolated`), once the one before has ended and its tokens are known; the step
behind it waits for that. An error while waiting is the device's failure: it is passed on, since nothing computed there
can be trusted any more. So is a device failure that `run_isolated` finds.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nodes.worker.errors import CollectiveFailed
from nodes.worker.executor.isolation import run_isolated, traceback_of
from nodes.worker.steps.step import PipelinedRunner, RunnableStep, StepOutcome, outcome_of, with_inputs


class _Flight:
    """One step. `on_device`: its tokens are on the device for the next step (False: it was run row by row)."""

    def __init__(self, step: RunnableStep, loop: asyncio.AbstractEventLoop) -> None:
        self.step = step
        self.on_device: asyncio.Future[bool] = loop.create_future()
        self.outcome: asyncio.Future[StepOutcome] = loop.create_future()

    async def drawn(self) -> dict[int, int]:
        """Tokens by row of the plan, when the step has ended."""
        # Shielded, here and below: the waiting task may be cancelled, but not the step itself.
        outcome = await asyncio.shield(self.outcome)
        return dict(zip(self.step.rows.numbers, outcome.token_ids, strict=True))

    def end(self) -> None:
        """Cancel what will not come, so that nobody waits for it."""
        self.on_device.cancel()
        self.outcome.cancel()


class StepsAhead:
    """Runs steps of one runner; `thread` launches. `run` is called in the order of the steps."""

    def __init__(self, runner: PipelinedRunner, thread: ThreadPoolExecutor) -> None:
        self._runner = runner
        self._thread = thread
        # A thread of its own: in the one that launches, waiting for a step would hold up launching the next.
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="device-wait")
        self._last: _Flight | None = None

    async def run(self, step: RunnableStep) -> StepOutcome:
        """What `run_isolated` returns; steps end in the order of the calls. Raises the error of a failed device."""
        # Set before anything is awaited: the next call must find this one as its predecessor.
        before, flight = self._last, _Flight(step, asyncio.get_running_loop())
        self._last = flight
        try:
            outcome = await self._run(flight, before)
            flight.outcome.set_result(outcome)
        finally:
            flight.end()
        return outcome

    def stop(self) -> None:
        self._waiting.shutdown(wait=False, cancel_futures=True)

    async def _run(self, flight: _Flight, before: _Flight | None) -> StepOutcome:
        loop = asyncio.get_running_loop()
        step, errors, failure = flight.step, [], ""
        # If the step before was run row by row, its tokens are on the host and not on the device.
        if before is not None and not await asyncio.shield(before.on_device):
            step, errors = with_inputs(step, await before.drawn())
        if step.rows:
            try:
                launched: Any = await loop.run_in_executor(self._thread, self._runner.launch, step)
            except CollectiveFailed:
                raise
            except Exception as error:  # noqa: BLE001 # run again below, where one row can be blamed
                failure = traceback_of(error)
            else:
                flight.on_device.set_result(True)
                outcome = await loop.run_in_executor(self._waiting, self._runner.finish, launched)
                return outcome_of(flight.step, step, outcome, errors)
        if before is not None:
            step, errors = with_inputs(flight.step, await before.drawn())
        outcome = StepOutcome([])
        if step.rows:
            outcome = await loop.run_in_executor(self._thread, run_isolated, self._runner, step)
        flight.on_device.set_result(False)
        # The second run may have succeeded: memory that was short is free once the step before has ended.
        return outcome_of(flight.step, step, outcome._replace(failure=outcome.failure or failure), errors)
