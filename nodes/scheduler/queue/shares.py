"""How much each client has been served, in tokens: the Virtual Token Counter of "Fairness in Serving Large Language
Models" (Sheng et al., OSDI 2024).

    served += (uncached tokens, when a sequence is admitted for the first time + 2 x output tokens) / weight

The least served client goes next (`policy.py`). A client that had nothing here and comes back is lifted to the least
served one of those that have: time away is not saved up. A debt stays until all others have caught up, or nobody has
anything here. Output is counted when someone asks, from acknowledged tokens, so that a step costs nothing more.
Pure; owned by the queue.
"""

from collections.abc import Iterable
from typing import Final

from nodes.request import MAX_WEIGHT
from nodes.scheduler.sequence import Sequence, Share

OUTPUT_COST: Final = 2
"""The paper's: an output token takes a row of a step of its own, the tokens of a prompt share one."""
MAX_IDLE: Final = 4096
"""Clients that have nothing here and are still in debt, some 300 bytes each: the one that left first is forgotten."""


class Shares:
    """Clients by name: those with sequences here, and those in debt to them. `running` are the sequences in steps."""

    def __init__(self, running: Iterable[Sequence] = ()) -> None:
        self._running = running
        self._active: dict[str, Share] = {}
        self._idle: dict[str, Share] = {}
        self._is_fresh = False

    def __len__(self) -> int:
        """How many clients are known."""
        return len(self._active) + len(self._idle)

    @property
    def num_active(self) -> int:
        """Clients that have sequences here, waiting or running."""
        return len(self._active)

    def find(self, client: str) -> Share | None:
        """The share of a client that has sequences here."""
        return self._active.get(client)

    def hold(self, sequence: Sequence) -> Share:
        """A sequence is here until `release`."""
        if sequence.share is not None:
            return sequence.share
        name = sequence.spec.client
        share = self._active.get(name)
        if share is None:
            share = self._active[name] = self._returned(name)
        # By what the newest of its requests says: weights change with the file of keys.
        share.weight = min(max(sequence.spec.weight, 1), MAX_WEIGHT)
        share.num_held += 1
        sequence.share, sequence.num_paid = share, sequence.num_output_tokens
        return share

    def release(self, sequence: Sequence) -> None:
        """It has ended; harmless if it was not held."""
        share = sequence.share
        if share is None:
            return
        self.settle(sequence)
        sequence.share = None
        share.num_held -= 1
        if share.num_held:
            return
        share.is_owed = False
        del self._active[share.name]
        if not self._active:
            # Nobody is there to whom anybody owes anything.
            self._idle.clear()
            return
        self._idle[share.name] = share
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]

    def charge(self, sequence: Sequence, num_prompt_tokens: int) -> None:
        """So many tokens of it are going to be computed that nobody had computed before."""
        if sequence.share is not None:
            sequence.share.served += num_prompt_tokens / sequence.share.weight

    def settle(self, sequence: Sequence) -> None:
        """Count the output that it has by now."""
        share, num_outputs = sequence.share, sequence.num_output_tokens
        if share is not None and num_outputs > sequence.num_paid:
            share.served += OUTPUT_COST * (num_outputs - sequence.num_paid) / share.weight
            sequence.num_paid = num_outputs

    def acknowledged(self) -> None:
        """Some of those that run have more output."""
        self._is_fresh = False

    def refresh(self) -> None:
        """Count the output of those that run: 256 of them take some 20 us, so it is done for who compares clients."""
        if not self._is_fresh:
            self._is_fresh = True
            for sequence in self._running:
                self.settle(sequence)

    def _returned(self, name: str) -> Share:
        share = self._idle.pop(name, None) or Share(name)
        if not self._active:
            return share
        self.refresh()
        least = min(one.served for one in self._active.values())
        share.served = max(share.served, least)
        # Whoever has nothing here and is not above the least would be lifted to it all the same.
        while self._idle and (first := next(iter(self._idle.values()))).served <= least:
            del self._idle[first.name]
        return share
