"""What a scheduler has and knows, in one set of books that all its parts read and write.

    pages       `cache`: allocator, tree and page table; `recovered`: held for those who come back; `loans` to grants
    sequences   `attempts` by request; each of them, and each order, in `queue`, in `running` or in a loan
    what next   `outbox` and `asks`: what is said at the end of the event; `deadlines`; `is_admission_due`
    worker      what the last one said of itself, and how fast prompts are computed

What only one part needs is its own. Pure; made by the core.
"""

from typing import TYPE_CHECKING, Final

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import RecoveredSequences
from kvstore.protocol import PoolHandle
from mesh.address import Address
from mesh.runtime.deadlines import Deadlines
from nodes.scheduler.asks import PersistentAsks
from nodes.scheduler.attempts import Attempts
from nodes.scheduler.batch.growth import GrowthEstimate
from nodes.scheduler.batch.running import Running
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Outbox
from nodes.scheduler.loans import Loan
from nodes.scheduler.queue.policy import WaitingQueue
from nodes.scheduler.rates import LearnedRate
from nodes.scheduler.sequence import Sequence, Stage
from nodes.trace_notes import Noted

if TYPE_CHECKING:
    from nodes.protocol import Adopted

REVOKED: Final = "revoked"
"""The code of a loan that ends because its sequence is not wanted any more, or its pages are needed."""


class Books:
    """See the module. `pool` is where the cache's pages lie."""

    def __init__(
        self,
        config: SchedulerConfig,
        address: Address,
        pool: PoolHandle,
        cache: PrefixCache,
        recovered: RecoveredSequences | None = None,
    ) -> None:
        self.config, self.address, self.pool, self.cache = config, address, pool, cache
        self.recovered = RecoveredSequences(cache) if recovered is None else recovered
        self.outbox = Outbox()
        self.deadlines = Deadlines()
        self.asks = PersistentAsks(self.outbox, self.deadlines)
        self.attempts = Attempts(config, self.deadlines)
        self.growth = GrowthEstimate(config.page_size)
        self.running = Running(config.page_size, self.growth)
        self.queue = WaitingQueue(
            config.policy,
            self._match_pages,
            starvation_s=config.starvation_s,
            page_size=config.page_size,
            running=self.running,
        )
        self.running.count_output = self.queue.shares.refresh
        # By grant, oldest first.
        self.loans: dict[str, Loan] = {}
        # Something changed since admission last looked who may enter.
        self.is_admission_due = False
        self.worker: Adopted | None = None
        # Tokens of prompts, by steps that have hardly anything else in them, and by prefills elsewhere.
        self.prefills = LearnedRate()

    @property
    def numerics(self) -> str:
        """How the last worker computes; empty before there was one."""
        return "" if self.worker is None else self.worker.numerics

    @property
    def num_entered(self) -> int:
        """Sequences that have pages to run with: in steps, or lent to a grant."""
        return len(self.running) + len(self.loans)

    def lent(self, stage: Stage) -> list[Sequence]:
        """Sequences in this stage whose pages are lent, oldest first."""
        return [loan.sequence for loan in self.loans.values() if loan.sequence.stage is stage]

    def loan_of(self, sequence: Sequence) -> Loan:
        """The loan of one whose pages are lent."""
        return next(loan for loan in self.loans.values() if loan.sequence is sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Have it wait again, ahead of all of its client's that were never admitted."""
        self.outbox.note(Noted.PUT_BACK, sequence.request_id, sequence.num_tokens, 0)
        sequence.stage = Stage.WAITING
        self.queue.put_back(sequence)
        self.is_admission_due = True

    def leave(self, sequence: Sequence, now: float) -> None:
        """Give back all that it holds; pages that a step or a transfer may still write follow once that has ended."""
        self.outbox.note(Noted.LEFT, sequence.request_id, sequence.num_tokens, 0)
        if sequence.stage in (Stage.HANDOFF, Stage.RESTORE):
            loan = self.loan_of(sequence)
            loan.lender.give_up(loan, REVOKED, now)
        self.queue.remove(sequence)
        self.queue.shares.release(sequence)
        self.running.leave(sequence, Stage.ENDED)

    def take_back(self, sequence: Sequence, now: float) -> None:
        """The pages of one that are lent are needed by another: it goes on in another way, if not now."""
        loan = self.loan_of(sequence)
        loan.lender.fail(loan, REVOKED, now)

    def _match_pages(self, sequence: Sequence) -> list[int]:
        return self.cache.match(sequence.reusable_ids, sequence.spec.extra_key).pages
