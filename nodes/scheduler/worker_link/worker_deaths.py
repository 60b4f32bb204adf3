"""What a worker's death does to the sequences it was computing.

    first death     the steps are sent again as they were: a crash costs a step
    second death    in the same step: one of its sequences may be the cause. The steps are taken back, and each of
                    their sequences goes through one step alone before it runs with others again
    third death     alone: the sequence is poisoned and fails for good, and the mesh lives on. It does so when the death
                    is heard of: until the next worker it could be moved, to kill another group's

A sequence that was moved here from a group whose worker died brings the deaths that it was part of there.

A fenced worker counts as dead: a sequence that makes it answer nonsense is found like one that kills it.
An acknowledged step clears a sequence. After too long without any worker everything is sent elsewhere.
Pure; owned by the core. The promise is that of `docs/architecture.md`: one bad request never takes the mesh with it.
"""

from nodes.scheduler.batch.step import Step
from nodes.scheduler.books import Books
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.finish.results import POISONED, Results
from nodes.scheduler.sequence import Sequence, Stage
from nodes.scheduler.worker_link.pipeline import MAX_DEATHS


class WorkerDeaths:
    """Suspects, and what becomes of them."""

    def __init__(self, books: Books, results: Results, endings: Endings) -> None:
        self._books = books
        self._results = results
        self._endings = endings
        self._suspects: dict[int, Sequence] = {}
        self.num_poisoned = 0

    def arrived(self, sequence: Sequence) -> None:
        """One that was moved here: if it was part of too many deaths already, it is alone in its steps from now on."""
        if sequence.num_deaths >= MAX_DEATHS:
            self._suspects[sequence.row_id] = sequence

    def next_suspect(self) -> Sequence | None:
        for row_id, one in list(self._suspects.items()):
            # One cleared by an acknowledged step, or that needs no more of them, is no longer a suspect.
            if not one.num_deaths or one.stage >= Stage.RETAINED:
                del self._suspects[row_id]
            elif one.stage in (Stage.PREFILL, Stage.DECODE):
                return one
        return None

    def on_died(self, unanswered: list[Sequence], now: float) -> None:
        """The worker is dead, and had not answered the steps of these: one that is convicted by it fails at once.

        For all others the death is counted when the next worker is adopted; if they move before, they bring it along.
        """
        if len(unanswered) == 1 and unanswered[0].num_deaths >= MAX_DEATHS and unanswered[0].stage < Stage.PREEMPTED:
            unanswered[0].num_deaths += 1
            self._poisoned(unanswered[0], now)

    def take_back(self, steps: list[Step], now: float) -> None:
        """Steps that are not sent again: their sequences return to where they stood before.

        All become suspects if one has been part of too many deaths; else a step was dropped with a row nobody wants.
        """
        for step in steps:
            for sequence in step.sequences:
                # By step, not by sequence: one that was in both steps in flight was counted twice.
                sequence.num_inflight -= 1
        sequences = list({sequence.row_id: sequence for step in steps for sequence in step.sequences}.values())
        is_suspicious = any(one.num_deaths >= MAX_DEATHS and one.stage is not Stage.ENDED for one in sequences)
        for sequence in sequences:
            if sequence.stage >= Stage.PREEMPTED:
                # All unanswered steps are taken back, so none of this sequence's is in flight any more.
                self._results.settle(sequence)
            # Only if alone, since a neighbour could be the cause: a request fails for good only on evidence against
            # itself.
            elif len(sequences) == 1 and sequence.num_deaths > MAX_DEATHS:
                self._poisoned(sequence, now)
            else:
                self._books.running.rewind(sequence)
                if is_suspicious:
                    self._suspects[sequence.row_id] = sequence

    def away_for_good(self, now: float) -> None:
        """No worker for too long: everything that waits for it fails, and can go elsewhere."""
        message = f"worker {self._books.config.worker} has been away for {self._books.config.worker_lost_timeout_s:g} s"
        self._endings.abort_all("worker_lost", message, now, keep_handoffs=True)

    def _poisoned(self, sequence: Sequence, now: float) -> None:
        self.num_poisoned += 1
        # Some of them elsewhere, if it was moved from there.
        worker = self._books.config.worker
        who = f"workers, the last of them {worker}," if sequence.cleared_at else worker
        message = f"{who} died {sequence.num_deaths} times while it computed this request, the last time alone"
        self._endings.end_badly(sequence, POISONED, message, False, now)
