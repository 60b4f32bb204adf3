"""How many more pages running sequences will need: a share of what their limits allow.

Nobody knows where a sequence will stop. The share sinks with every step (most requests end before their limit) and is
raised again when a preemption shows that it was too low (SGLang's new_token_ratio). Pure; used by admission and
preemption.
"""

from collections.abc import Iterable

from nodes.scheduler.sequence import Sequence

GROWTH_HORIZON_TOKENS = 4096
"""Limits default to the whole context, which hardly any request uses: at most 4,096 tokens ahead are reserved."""
FIRST_RATIO = 0.7
"""SGLang's, as the next three: little is preempted at first, while lengths are unknown."""
LEAST_RATIO = 0.1
"""Less would admit sequences only to preempt them, and a preemption computes all tokens again."""
DECAY_STEPS = 600
"""SGLang's: 0.001 a step, so that the share has sunk when requests of some hundred tokens have ended."""
PREEMPTION_MARGIN_TOKENS = 20
"""SGLang's: with less, the next preemption would come a few steps after this one."""


class GrowthEstimate:
    """Share of their remaining limit that running sequences are expected to use."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.new_token_ratio = FIRST_RATIO

    def stepped(self) -> None:
        self.new_token_ratio = max(LEAST_RATIO, self.new_token_ratio - (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS)

    def idle(self) -> None:
        """Nothing runs: what was learned from these requests says nothing of the next ones."""
        self.new_token_ratio = FIRST_RATIO

    def preempted(self, remaining: Iterable[Sequence]) -> None:
        """Pages ran out with `remaining` still running: expect at least the share of limits that these used."""
        used = allowed = 0
        for sequence in remaining:
            num_outputs = sequence.num_tokens - sequence.num_prompt_tokens
            used += num_outputs + PREEMPTION_MARGIN_TOKENS
            # At least 1: a sequence at its limit would make the share a division by zero.
            allowed += max(1, sequence.max_length - sequence.num_prompt_tokens)
        if allowed:
            self.new_token_ratio = min(1.0, max(self.new_token_ratio, used / allowed))

    def num_pages(self, sequence: Sequence) -> int:
        """Pages that `sequence` is expected to need beyond those for the tokens it has."""
        # A prefill for another scheduler draws one token and grows no further.
        if sequence.order_id:
            return 0
        # `num_kv_tokens` and `num_tokens` without their calls: admission asks this of all that run.
        left = min(sequence.max_length - 1 - len(sequence.token_ids), GROWTH_HORIZON_TOKENS)
        return -(-int(left * self.new_token_ratio) // self._page_size) if left > 0 else 0
