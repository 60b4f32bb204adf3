"""Sequences that take part in steps: which are in, get pages, or are preempted, and when pages are given back.

A decoding sequence needs another page every `page_size` tokens. When the pool has none left, cached pages are evicted
(by the prefix cache), then sequences are preempted: of the most served client the one with fewest outputs, among
equals the youngest. Their tokens stay; their full pages stay in the cache as long as nobody needs them, so that
starting again is often cheap. The last sequence is not preempted for others: it waits for pages that transfers and
orders still hold, or takes back granted ones.

Pages of a sequence that left are given back when no unacknowledged step can write them any more. Pure; owned by the
core.
"""

from collections.abc import Callable, Iterator

from nodes.scheduler.batch.growth import GrowthEstimate
from nodes.scheduler.batch.slots import Slots
from nodes.scheduler.sequence import Sequence, Stage


class Running:
    """Sequences in steps, and those that left and wait for their last step."""

    def __init__(self, page_size: int, growth: GrowthEstimate) -> None:
        self._page_size = page_size
        self._growth = growth
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}
        self.slots = Slots()
        self.num_preemptions = 0
        # Counts the output of all of them for their clients, before these are compared.
        self.count_output: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefilling.values()
        yield from self.decoding.values()

    @property
    def num_leaving(self) -> int:
        """Sequences that left and whose pages a step may still write."""
        return len(self._leaving)

    def num_prefill_tokens(self, chunk_tokens: int) -> int:
        """Tokens of admitted prompts that the next step could take."""
        return sum(min(sequence.num_unscheduled, chunk_tokens) for sequence in self.prefilling.values())

    def enter(self, sequence: Sequence) -> None:
        """Take in a sequence whose pages cover all its tokens."""
        if sequence.slot < 0:
            sequence.slot = self.slots.take()
        # One unscheduled token means decoding, also after a prefix of which all but the last token was cached.
        if sequence.is_prompt_left:
            sequence.stage = Stage.PREFILL
            self.prefilling[sequence.row_id] = sequence
        else:
            sequence.stage = Stage.DECODE
            self.decoding[sequence.row_id] = sequence

    def on_step_sent(self, sequences: list[Sequence]) -> None:
        """Prompts whose last chunk is sent decode from now on."""
        for sequence in sequences:
            if sequence.stage is Stage.PREFILL and not sequence.is_prompt_left:
                del self.prefilling[sequence.row_id]
                self.enter(sequence)

    def alone(self, sequence: Sequence) -> tuple[list[Sequence], list[Sequence]]:
        """The decoding and the prefilling sequences of a step that consists of this one alone."""
        return ([sequence], []) if sequence.row_id in self.decoding else ([], [sequence])

    def rewind(self, sequence: Sequence) -> None:
        """No step of it is in flight any more: it goes back to where its last acknowledged step left it."""
        self.prefilling.pop(sequence.row_id, None)
        self.decoding.pop(sequence.row_id, None)
        sequence.length = len(sequence.token_ids)
        # The last token's position is computed again even if its KV is there: only that gives the logits to draw from.
        sequence.num_scheduled = min(sequence.num_computed, sequence.length - 1)
        self.enter(sequence)

    def leave(self, sequence: Sequence, stage: Stage) -> bool:
        """Take it out of steps. True if its pages are given back already; else `settle` gives them back later."""
        self.prefilling.pop(sequence.row_id, None)
        self.decoding.pop(sequence.row_id, None)
        sequence.stage = stage
        # A step in flight writes its pages whatever is decided here; given away now, they would be overwritten.
        if sequence.num_inflight:
            self._leaving[sequence.row_id] = sequence
            return False
        self._leaving.pop(sequence.row_id, None)
        self._give_back_slot(sequence)
        sequence.drop_pages()
        return True

    def retain(self, sequence: Sequence) -> None:
        """Take it out of steps, but keep its pages for the agent that copies them."""
        self.prefilling.pop(sequence.row_id, None)
        self.decoding.pop(sequence.row_id, None)
        sequence.stage = Stage.RETAINED
        if not sequence.num_inflight:
            self._give_back_slot(sequence)

    def settle(self, sequence: Sequence) -> None:
        """The last step of a sequence that left is acknowledged: its pages are given back."""
        self._leaving.pop(sequence.row_id, None)
        self._give_back_slot(sequence)
        sequence.drop_pages()

    def secure_pages(self) -> tuple[list[Sequence], Sequence | None]:
        """Get a page for the next token of every decoding sequence, oldest first, by preemption if need be.

        Returns those that were preempted, and the last one if it lacks a page although no other is left to preempt.
        """
        preempted: list[Sequence] = []
        stuck: Sequence | None = None
        # A list: preempting changes the dictionary that is walked.
        short = [sequence for sequence in self.decoding.values() if sequence.num_scheduled >= sequence.capacity]
        for sequence in short:
            while not self._has_page(sequence):
                if self._leaving:
                    # Pages are about to be given back: a sequence without one sits this step out.
                    break
                victim = self._victim()
                if victim is None:
                    stuck = sequence
                    break
                self.preempt(victim)
                preempted.append(victim)
        return preempted, stuck

    def preempt(self, victim: Sequence) -> None:
        """Take pages from a sequence: its tokens stay, their KV is computed again when it is admitted again."""
        # Before it leaves: the estimate is raised by what the others have used of their limits.
        self._growth.preempted(sequence for sequence in self if sequence is not victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.leave(victim, Stage.PREEMPTED)

    def _give_back_slot(self, sequence: Sequence) -> None:
        self.slots.give_back(sequence.slot)
        sequence.slot = -1

    def _has_page(self, sequence: Sequence) -> bool:
        # Preempted for an earlier one in the caller's loop, or it has a page already.
        if sequence.stage is not Stage.DECODE or sequence.num_scheduled < sequence.capacity:
            return True
        # It draws no further token, so it needs no page for one.
        if sequence.length >= sequence.max_length:
            return True
        return sequence.reserve(sequence.num_scheduled + 1, self._page_size)

    def _victim(self) -> Sequence | None:
        """The sequence that loses least; None if there is only one."""
        # Prefills for other schedulers are left alone: an agent may be copying the pages announced to it.
        candidates = [sequence for sequence in self if not sequence.order_id]
        if len(candidates) < 2:
            return None
        self.count_output()
        # By client first: whoever was just let in has the fewest outputs, and would be the first to go again.
        return min(candidates, key=lambda one: (-_served(one), one.num_output_tokens, -one.arrived_at, -one.row_id))


def _served(sequence: Sequence) -> float:
    return 0.0 if sequence.share is None else sequence.share.served
