"""Scenarios in which workers are sent as many steps at once as there may be, and the bugs that only then can show.

Groups have quick steps or slow ones, and the horizon is long enough for eight of the quick ones. Beside what every
scenario sees, it sees that the steps on their way to a worker never take longer than the horizon: whoever comes waits
for them.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import msgspec
from typing_extensions import override

from nodes.protocol.steps import RowColumn
from nodes.scheduler.batch.step import Step
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.finish.results import Results
from nodes.scheduler.sequence import Stage
from nodes.scheduler.worker_link.pipeline import Pipeline
from tests.simulation import scenario
from tests.simulation.planting import Bug, bug
from tests.simulation.whole_mesh import SimulatedMesh

HORIZON_S = 0.1
QUICK_MS, SLOW_MS = 2, 30


class PlannedMesh(SimulatedMesh):
    """Its schedulers look as far ahead as `HORIZON_S`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        steps = dict.fromkeys(self.groups, QUICK_MS if self.seed % 3 else SLOW_MS)
        self.speeds = self.speeds._replace(step_ms=steps)

    @override
    def _scheduler(self, group: str, spec: Any) -> SchedulerConfig:
        return msgspec.structs.replace(super()._scheduler(group, spec), plan_horizon_s=HORIZON_S)


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came, and how often steps were sent together.

    Raises AssertionError with the messages and the replay.
    """
    counts: Counter[str] = Counter()
    late: list[str] = []
    step_s = (QUICK_MS if seed % 3 else SLOW_MS) * 1e-3
    send = Pipeline.send

    def watched(self: Pipeline, steps: list[Step], now: float) -> None:
        counts["plans"] += len(steps) > 1
        counts["steps in plans"] += len(steps) * (len(steps) > 1)
        send(self, steps, now)
        # Of plans alone: of single steps one waits while one runs, however long they take.
        if len(steps) > 1 and (num := self.num_inflight) * step_s > HORIZON_S + 2 * step_s:
            late.append(f"{num} steps of {step_s} s are on their way to {self._books.config.worker}")

    with patch.object(Pipeline, "send", watched):
        found = scenario.run_seed(seed, suite="plans", kind=PlannedMesh)
    assert not late, "\n".join([*late[:5], f"replay: python -m tests.simulation plans {seed}"])
    return found + counts


# planted bugs


def _looked_at_last(draw: Any, self: Results, sequences: list[Any], now: float) -> None:
    """Whether a sequence ends is judged by the last token on its way."""
    draw(self, [one for one in sequences if not one.num_inflight], now)
    self._drawn.update((one.row_id, one) for one in sequences if one.num_inflight)


def _free_at_the_first(acknowledge: Any, self: Results, acknowledged: Any, now: float) -> bool:
    for one in acknowledged.step.sequences:
        if one.stage >= Stage.PREEMPTED:
            one.num_inflight = min(one.num_inflight, 1)
    # Its other steps are still answered: none of them may bring the count below what the first one left.
    later = [one for one in acknowledged.step.sequences if one.num_inflight <= 0]
    for one in later:
        one.num_inflight += 1
    return acknowledge(self, acknowledged, now)


def _of_the_step_before(filled_in: Any, self: Step, drawn: dict[int, int]) -> Step:
    if any(count > 1 for count in self.column(RowColumn.COUNT)):
        return filled_in(self, drawn)
    before = {one.row_id: one.token_ids[-2] for one in self.sequences if len(one.token_ids) > 1}
    return filled_in(self, drawn | before)


def _for_two(on_results: Any, self: SchedulerCore, sender: Any, results: Any, now: float) -> None:
    twice = [each for one in results for each in (one, msgspec.structs.replace(one, step=one.step + 1))]
    on_results(self, sender, twice, now)


PLANS: dict[str, Bug] = {
    "a token after a stop id is used": bug(0, (Results, "draw", _looked_at_last)),
    "a cancelled row's page is used again before the plan ends":
        bug(4, (Results, "acknowledge", _free_at_the_first)),
    "a plan is sent again from its middle with old inputs": bug(13, (Step, "filled_in", _of_the_step_before)),
    "whoever comes waits beyond the horizon":
        bug(0, (StepPace, "steps_within", lambda _, self, seconds, num_decoding, most: most)),
    "one step's answer is taken for two": bug(0, (SchedulerCore, "_on_results", _for_two)),
}  # fmt: skip
