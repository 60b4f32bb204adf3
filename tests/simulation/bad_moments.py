"""Deaths in the moments that promises are about: during a step that takes seconds, or a copy that cannot stop at once.

Such moments are short or rare, and so are deaths: drawn independently they would meet in one seed of a thousand. On
real hosts they meet more often than that, since what makes a step or a copy slow also makes its neighbours die.
"""

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Sequence

from mesh.testing.processes import ProcessState, SimulatedProcess
from nodes.worker.steps.step import RunnableStep

MOST_STALLS = 3
MOST_BAD_COPIES = 3


class BadMoments:
    """Decides when one of `processes` dies because of what another one does. `counts` says how often that happened.

    Theme `stalls`: steps of one group take seconds, and its scheduler dies soon after such a step has begun. `copies`:
    while a copy writes, its scheduler dies, alone or with the prefill scheduler; `sources`: the prefill scheduler dies.
    """

    def __init__(self, seed: int, theme: str, groups: list[str], processes: dict[str, SimulatedProcess]) -> None:
        self._dice = random.Random(f"moments/{seed}")
        self._processes = processes
        # Transfers end at the last group, where pages that a step still writes are most likely lent to one.
        self._first = groups[0]
        self._stalling = self._dice.choice([*groups, groups[-1]]) if theme == "stalls" else ""
        self._num_stalls_left = MOST_STALLS
        self._num_copies_left = MOST_BAD_COPIES if theme in ("copies", "sources") else 0
        self._is_source = theme == "sources"
        self._context = contextvars.copy_context()
        self.counts: Counter[str] = Counter()

    def stall_s(self, group: str, step: RunnableStep) -> float:
        """How much longer this step of `group` takes; most often one with prompt chunks, whose shapes may be new."""
        dice = self._dice
        rate = 0.3 if any(row.num_tokens > 1 for row in step.rows) else 0.03
        if group != self._stalling or not self._num_stalls_left or dice.random() >= rate:
            return 0.0
        self._num_stalls_left -= 1
        self.counts["stalled"] += 1
        if dice.random() < 0.8:
            self.die_soon("died in a step", [f"scheduler-{group}"], dice.random() * dice.choice([0.01, 0.3]))
        return dice.uniform(0.5, 3.0)

    def on_copy(self, group: str, copy_s: float) -> None:
        """A copy into the pool of `group` begins, with `copy_s` for each quantum."""
        dice = self._dice
        if self._num_copies_left and dice.random() < 0.2:
            self._num_copies_left -= 1
            both = [f"scheduler-{group}", f"scheduler-{self._first}"]
            dying = both[1:] if self._is_source else dice.choice([both, both, both[:1]])
            self.die_soon("died in a copy", dying, dice.random() * 10 * copy_s)

    def end(self) -> None:
        """Cause no more deaths and stalls."""
        self._num_stalls_left = self._num_copies_left = 0
        self._processes = {}

    def die_soon(self, why: str, actor_ids: Sequence[str], after_s: float) -> None:
        """These die together, unless nothing happens any more by then; `why` is what is counted."""
        # Not in the context of the process that stalls or copies, which may die itself.
        asyncio.get_running_loop().call_later(after_s, self._die, why, actor_ids, context=self._context)

    def _die(self, why: str, actor_ids: Sequence[str]) -> None:
        for actor_id in actor_ids:
            process = self._processes.get(actor_id)
            if process is not None and process.state is ProcessState.RUNNING:
                self.counts[why] += 1
                process.kill()
