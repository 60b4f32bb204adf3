"""The workers of one group, one for each tensor-parallel rank, seen by the pipeline as one worker.

Each rank gets the same steps and answers each of them; ranks draw the same tokens, because they draw from the same
logits with the same counters. A step is over when every rank has answered it: until then its pages may be written.

    epochs    ranks form a group by exact incarnations, and the epoch of rank 0 names it (`Adopted.group_epoch`): a rank
              that dies takes its group with it, so a group is whole or gone, and a later one has a later name
    adopted   once every rank has answered for the same group; a rank that answers for an earlier one is asked again
    results   kept by step until the last rank's is here; different tokens are a fault of the group

With one rank everything passes through. Pure; owned by the pipeline.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from mesh.address import Address
from nodes.protocol import Adopted, RowError, StepResult


class Disagreement(NamedTuple):
    """The ranks answered a step differently, in words."""

    text: str


class AdoptedRanks:
    """Gathers the answers of the ranks; `worker_ids` are their actor ids, in order of rank."""

    def __init__(self, worker_ids: Sequence[str]) -> None:
        self.worker_ids = tuple(worker_ids)
        self._adopted: dict[int, Adopted] = {}
        self._ranks: dict[Address, int] = {}
        self._results: dict[int, dict[int, StepResult]] = {}
        self._last: frozenset[Address] = frozenset()

    def begin(self) -> None:
        """The group is to be adopted: answers so far do not count."""
        self._adopted.clear()
        self._ranks.clear()
        self._results.clear()

    def take_adopted(self, rank: int, adopted: Adopted) -> list[int]:
        """A rank has answered. Returns ranks to ask again: they answered for a group that is over or does not exist."""
        self._adopted[rank] = adopted
        if len(self.worker_ids) == 1:
            return []
        first = self._adopted.get(0)
        # A group is named by rank 0's epoch and epochs only grow, so a rank that names a later group has seen the
        # earlier one end.
        newest = max(answer.group_epoch for answer in self._adopted.values())
        stale = [rank for rank, answer in self._adopted.items() if answer.group_epoch < newest]
        # Rank 0's epoch is the group's name: if rank 0 answers with another name, that group does not exist.
        if first is not None and first.worker_epoch != first.group_epoch and 0 not in stale:
            stale.append(0)
        for number in stale:
            del self._adopted[number]
        return stale

    def whole(self) -> Adopted | None:
        """The group's answer as a whole, once all its ranks have answered; from then on their results are taken."""
        if len(self._adopted) < len(self.worker_ids):
            return None
        answers = [self._adopted[rank] for rank in range(len(self.worker_ids))]
        # By exact incarnation, so that a result of a predecessor which is still on its way is not taken for this
        # group's.
        self._ranks = {
            Address(actor_id, answer.worker_epoch): rank
            for rank, (actor_id, answer) in enumerate(zip(self.worker_ids, answers, strict=True))
        }
        self._last = frozenset(self._ranks)
        if len(answers) == 1:
            return answers[0]
        return msgspec.structs.replace(
            answers[0],
            # The least of all: a token or a batch that one rank cannot take must not be sent to any.
            vocab_size=_least(answer.vocab_size for answer in answers),
            max_batch_tokens=_least(answer.max_batch_tokens for answer in answers),
            asks=[ask for ask in answers[0].asks if all(ask in answer.asks for answer in answers)],
        )

    def rank_of(self, worker: Address) -> int:
        """The rank of an adopted incarnation; -1 for any other."""
        return self._ranks.get(worker, -1)

    def was_whole_with(self, worker: Address) -> bool:
        """Whether this incarnation was part of the group that was adopted last."""
        return worker in self._last

    def addresses(self) -> list[Address]:
        """The incarnations that were adopted, by rank."""
        return list(self._ranks)

    def is_older(self, actor_id: str, epoch: int) -> bool:
        """Whether this rank's answer so far came from an incarnation before `epoch`."""
        if actor_id not in self.worker_ids:
            return False
        answer = self._adopted.get(self.worker_ids.index(actor_id))
        return answer is not None and answer.worker_epoch < epoch

    def gather(self, rank: int, result: StepResult) -> StepResult | Disagreement | None:
        """A rank's answer to a step in flight. Returns the group's once the last rank has answered, and forgets it.

        The first answer of a rank stands. The caller bounds the steps in flight.
        """
        if len(self.worker_ids) == 1:
            return result
        answers = self._results.setdefault(result.step, {})
        # The first stands because a step may be sent again, and both answers are the same bits.
        answers.setdefault(rank, result)
        if len(answers) < len(self.worker_ids):
            return None
        del self._results[result.step]
        return _merge([answers[rank] for rank in range(len(self.worker_ids))])


def _least(limits: Iterable[int]) -> int:
    """The lowest limit; 0 means no limit."""
    return min((limit for limit in limits if limit), default=0)


def _merge(results: list[StepResult]) -> StepResult | Disagreement:
    """One result out of all. A row that failed at one rank has failed; on all other rows the ranks have to agree."""
    first = results[0]
    errors: dict[int, RowError] = {}
    for result in results:
        for error in result.errors:
            errors.setdefault(error.row, error)
    for rank, result in enumerate(results):
        if result.token_ids == first.token_ids:
            continue
        if len(result.token_ids) != len(first.token_ids):
            counts = f"{len(first.token_ids)} and {len(result.token_ids)} tokens"
            return Disagreement(f"ranks 0 and {rank} answered step {first.step} with {counts}")
        for row, (drawn, other) in enumerate(zip(first.token_ids, result.token_ids, strict=True)):
            if drawn != other and row not in errors:
                return Disagreement(f"ranks 0 and {rank} drew {drawn} and {other} for row {row} of step {first.step}")
    # Nearly always so, and then no new message is made for the step.
    if not errors and first.elapsed_s >= max(result.elapsed_s for result in results):
        return first
    return msgspec.structs.replace(
        first,
        errors=[errors[row] for row in sorted(errors)],
        # The slowest rank's: deadlines of later steps are derived from it.
        elapsed_s=max(result.elapsed_s for result in results),
    )
