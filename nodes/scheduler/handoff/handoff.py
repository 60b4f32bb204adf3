"""One handoff as the decode side knows it while it lives."""

from kvstore.cache.block_table import ExportedPages
from nodes.protocol import PrefillDone, PrefillOrder
from nodes.scheduler.loans import Lender, Loan
from nodes.scheduler.sequence import Sequence


class Handoff(Loan):
    """Of one sequence, until its pages and its first token are here; `peer` is the prefill scheduler."""

    __slots__ = ("done", "done_at", "heard_at", "is_ordered")

    def __init__(
        self, lender: "Lender[Handoff]", sequence: Sequence, lent: ExportedPages, now: float, timeout_s: float
    ) -> None:
        super().__init__(lender, sequence, lent, now, timeout_s, sequence.prefill)
        # `heard_at` starts now, although no peer was heard yet: silence is then counted from the opening.
        self.done_at = self.heard_at = now
        self.is_ordered = False
        self.done: PrefillDone | None = None

    def order(self, page_size: int, agent: str, now: float) -> PrefillOrder:
        """The order for the missing pages, to be sent first and as a renewal; pages have `page_size` tokens each."""
        sequence = self.sequence
        return PrefillOrder(
            grant_id=self.grant_id,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            token_ids=sequence.token_ids.tolist(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            # Pages cached here are not sent; nor are they computed, if the prefill scheduler has them cached, too.
            num_skip_tokens=self.lent.first * page_size,
            spec=sequence.spec,
            agent=agent,
            # The time left for the handoff at each renewal: the prefill is given up no later there than here.
            timeout_s=max(0.0, self.opened_at + self.timeout_s - now),
            deaths=sequence.num_deaths,
            cleared_at=sequence.cleared_at,
        )
