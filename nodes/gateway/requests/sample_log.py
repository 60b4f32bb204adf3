"""What became of one sample, noted while it runs: its attempts with their stages, and the pauses in its output. Pure.

The core of the gateway calls this beside its decisions, never for a token that comes as fast as the one before: what
it costs is per attempt, not per token.
"""

from typing import Final

from nodes.protocol.records import NOT_YET, STALL_S, AttemptRecord, SampleRecord, StallRecord, since
from nodes.request import Stages

STALL_PACES: Final = 4
"""A model that takes 0.3 s for a token does not stall at each: a stall is so many times what its other pauses are."""
MAX_STALLS: Final = 8
"""The longest are kept: a sample that was put back a hundred times says so by its attempts and by the others."""
MAX_ATTEMPTS: Final = 32
"""Five may fail, but each may be refused by one scheduler after the other for half a minute: the first and the last
ones are kept.
"""
_MAX_WHY_CHARS: Final = 200
"""Two lines of a terminal; there may be 32 of them in a record."""


class SampleLog:
    """Takes times on the core's clock; records have them from the arrival on."""

    __slots__ = ("_arrived_at", "_attempts", "_first_token", "_pauses", "first_token_s", "num_pauses", "stall_s")

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._attempts: list[AttemptRecord] = []
        self._pauses: list[StallRecord] = []
        self._first_token = arrived_at
        self.first_token_s = NOT_YET
        self.num_pauses = 0
        """How often output came after its first: the core counts, for a call would cost more than the number is."""
        self.stall_s = 0.0

    def submitted(self, number: int, scheduler: str, prefill: str, detokenizer: str, now: float) -> None:
        if len(self._attempts) == MAX_ATTEMPTS:
            # Where it began and how it ends say more than what was between them.
            del self._attempts[MAX_ATTEMPTS // 2]
        self._attempts.append(
            AttemptRecord(
                attempt=number,
                scheduler=scheduler,
                submitted_s=since(self._arrived_at, now),
                prefill=prefill,
                detokenizer=detokenizer,
            )
        )

    def accepted(self, now: float, epoch: int) -> None:
        """The scheduler's incarnation `epoch` holds the attempt; told late, if its output overtook the answer."""
        last = self._attempts[-1]
        last.epoch = epoch
        # An attempt that is submitted again, because the answer was lost, was held from the first one on.
        if last.accepted_s < 0:
            last.accepted_s = since(self._arrived_at, now)

    def staged(self, stages: Stages, now: float) -> None:
        """The attempt's first output came, with its stages; told again if its stream was opened again."""
        last = self._attempts[-1]
        if last.first_s < 0:
            last.first_s = since(self._arrived_at, now)
            last.queue_s, last.grant_s = since(0.0, stages.queue_s), since(0.0, stages.grant_s)
            last.prefill_s, last.transfer_s = since(0.0, stages.prefill_s), since(0.0, stages.transfer_s)

    def first_token(self, now: float) -> None:
        self._first_token = now
        self.first_token_s = since(self._arrived_at, now)

    def paused(self, position: int, took_s: float, now: float) -> None:
        """A token came `took_s` after the one before; to be called only if that is longer than any pause before it,
        or than `STALL_S`.
        """
        self.stall_s = max(self.stall_s, took_s)
        if took_s <= STALL_S:
            return
        self._pauses.append(StallRecord(position=position, ended_s=since(self._arrived_at, now), took_s=took_s))
        if len(self._pauses) > MAX_STALLS:
            self._pauses.remove(min(self._pauses, key=lambda pause: pause.took_s))

    def failed(self, failure: str, why: str, now: float) -> None:
        """What the sample was waiting for from its last submission will not come. Of several reasons the first one."""
        last = self._attempts[-1]
        if last.ended_s < 0:
            last.ended_s, last.failure = since(self._arrived_at, now), failure
            last.why = why[:_MAX_WHY_CHARS]

    def record(
        self,
        request_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        *,
        last_token: float,
        ended: float | None = None,
        finish: str = "",
        failure: str = "",
    ) -> SampleRecord:
        """All of it, and what is known of the sample besides; `ended` None: it runs."""
        last = self._attempts[-1] if self._attempts else None
        ended_s = NOT_YET if ended is None else since(self._arrived_at, ended)
        if last is not None and last.ended_s < 0:
            # What ended the sample ended its last attempt, unless that had failed and nothing came after it.
            last.ended_s = ended_s
        return SampleRecord(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            first_token_s=self.first_token_s,
            last_token_s=since(self._arrived_at, last_token) if output_tokens else NOT_YET,
            ended_s=ended_s,
            finish=finish,
            failure=failure,
            attempts=list(self._attempts),
            stalls=self._stalls(last_token) if self._pauses else [],
        )

    def _stalls(self, last_token: float) -> list[StallRecord]:
        """The long pauses that are not the pace of this output, which is told from all others, earlier and later ones.

        So one among the first tokens is found, too, before which there is no pace to compare it with, or that of a
        pipeline that fills: the second token of a handoff came after 0.1 s where later ones came after 5 ms.
        """
        if self.num_pauses == 1:
            # Of two tokens: there is nothing to compare it with.
            return list(self._pauses)
        rest_s, num_rest, num_stalls = last_token - self._first_token, self.num_pauses, 0
        longest = sorted(self._pauses, key=lambda pause: pause.took_s, reverse=True)
        for number, pause in enumerate(longest, 1):
            rest_s, num_rest = rest_s - pause.took_s, num_rest - 1
            # Beside several stalls in a short answer the longest one may not look like one: what is longer, is.
            if num_rest and pause.took_s * num_rest > STALL_PACES * rest_s:
                num_stalls = number
        stalls = {id(pause) for pause in longest[:num_stalls]}
        return [pause for pause in self._pauses if id(pause) in stalls]
