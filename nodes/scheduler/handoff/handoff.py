"""One handoff as the decode side knows it while it lives, and the two ways in which it ends."""

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.cache.block_table import ExportedPages
from nodes.protocol import PrefillDone, PrefillOrder
from nodes.scheduler.sequence import Sequence


class HandoffDone(NamedTuple):
    """All pages are in and the first token is drawn."""

    sequence: Sequence
    token_id: int
    num_cached_tokens: int
    extra: bytes = b""


class HandoffFailed(NamedTuple):
    """The handoff failed. `complete`: all pages are in nevertheless, and belong to the sequence again.

    `message` is what the prefill scheduler said, if it is the prefill that failed.
    """

    sequence: Sequence
    reason: str
    complete: bool
    message: str = ""


Outcome = HandoffDone | HandoffFailed


class Handoff:
    """One live handoff, as the decode side knows it. Written by `DecodeHandoffQueue` only."""

    __slots__ = (
        "deadline", "done", "done_at", "grant_id", "heard_at", "is_ordered", "is_pulled", "lent", "num_pulled",
        "opened_at", "prefill", "sequence",
    )  # fmt: skip

    def __init__(self, grant_id: str, sequence: Sequence, lent: ExportedPages, now: float, deadline: float) -> None:
        self.grant_id = grant_id
        self.sequence = sequence
        self.lent = lent
        self.prefill = sequence.prefill
        self.deadline = deadline
        # `heard_at` starts now, although no peer was heard yet: silence is then counted from the opening.
        self.opened_at = self.done_at = self.heard_at = now
        self.is_ordered = False
        self.is_pulled = False
        self.num_pulled = 0
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
            sampling=sequence.spec.sampling,
            agent=agent,
            extra_key=sequence.spec.extra_key,
            # The time left for the handoff at each renewal: the prefill is given up no later there than here.
            timeout_s=max(0.0, self.deadline - now),
            client=sequence.spec.client,
            weight=sequence.spec.weight,
            priority=sequence.spec.priority,
            deaths=sequence.num_deaths,
            cleared_at=sequence.cleared_at,
        )


def ended(answers: Iterable[Outcome | None]) -> list[Outcome]:
    return [outcome for outcome in answers if outcome is not None]
