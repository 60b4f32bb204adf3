"""Devices that fail under a worker: a step that raises once, one that never ends, and the end of the device itself.

None of these is a request's fault, so no request may end because of one. The last two end the worker, once per mesh: by
rule, requests in a step that three workers die of count as poisoned.
"""

import random
from collections import Counter

from nodes.worker.steps.step import RunnableStep, Runner, StepOutcome

SHARE = 0.2
RATE = 0.03
MOST_CROWDED = 2
MOST_DEADLY = 1


class BadDevices:
    """Strikes steps of workers without other ranks, in `SHARE` of all meshes. `counts` says how often it did what."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"smoke/{seed}")
        is_bad = self._dice.random() < SHARE
        self._num_left = {"crowded": MOST_CROWDED * is_bad, "deadly": MOST_DEADLY * is_bad}
        self.counts: Counter[str] = Counter()

    def strike(self) -> str:
        """What happens to the step that begins now: `crowded`, `broken`, `stuck` or nothing."""
        if self._dice.random() >= RATE:
            return ""
        kind = self._dice.choice(["crowded", "broken", "stuck"])
        budget = "crowded" if kind == "crowded" else "deadly"
        if not self._num_left[budget]:
            return ""
        self._num_left[budget] -= 1
        self.counts[f"device {kind}"] += 1
        return kind

    def end(self) -> None:
        """Strike no more."""
        self._num_left = {"crowded": 0, "deadly": 0}


class BadRunner:
    """A runner that raises for batches (`crowded`) or for everything."""

    def __init__(self, runner: Runner, kind: str) -> None:
        self._runner = runner
        self._kind = kind
        self.numerics = runner.numerics

    def run(self, step: RunnableStep) -> StepOutcome:
        if self._kind == "broken" or (self._kind == "crowded" and len(step.rows) > 1):
            raise RuntimeError(self._kind)
        return self._runner.run(step)
