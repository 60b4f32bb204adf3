"""What became of one sample, noted while it runs: its attempts with their stages, and the pauses in its output. Pure.

The core of the gateway calls this beside its decisions, never for a token that comes as fast as the one before: what
it costs is per attempt, not per token.
"""

from typing import Final, NamedTuple

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


class _Attempt:
    """One submission under way; times as in `AttemptRecord`, on the core's clock."""

    __slots__ = ("accepted", "detokenizer", "ended", "epoch", "failure", "first", "number", "prefill", "scheduler",
                 "stages", "submitted", "why")  # fmt: skip

    def __init__(self, number: int, scheduler: str, prefill: str, detokenizer: str, now: float) -> None:
        self.number = number
        self.scheduler = scheduler
        self.prefill = prefill
        self.detokenizer = detokenizer
        self.epoch = 0
        self.submitted = now
        self.accepted: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.stages: Stages | None = None
        self.failure = self.why = ""


class SampleLog:
    """Times on the core's clock; `record` tells them from the arrival on."""

    __slots__ = ("_arrived_at", "_attempts", "_first_token", "_pauses", "first_token_s", "num_pauses", "stall_s")

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._attempts: list[_Attempt] = []
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
        self._attempts.append(_Attempt(number, scheduler, prefill, detokenizer, now))

    def accepted(self, now: float, epoch: int) -> None:
        """The scheduler's incarnation `epoch` holds the attempt; told late, if its output overtook the answer."""
        last = self._attempts[-1]
        last.epoch = epoch
        # An attempt that is submitted again, because the answer was lost, was held from the first one on.
        if last.accepted is None:
            last.accepted = now

    def staged(self, stages: Stages, now: float) -> None:
        """The attempt's first output came, with its stages; told again if its stream was opened again."""
        last = self._attempts[-1]
        if last.stages is None:
            last.stages, last.first = stages, now

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
        if last.ended is None:
            last.ended, last.failure, last.why = now, failure, why[:_MAX_WHY_CHARS]

    def record(self, sample: "SampleSoFar") -> SampleRecord:
        """All of it."""
        arrived_at, output_tokens = self._arrived_at, sample.output_tokens
        return SampleRecord(
            request_id=sample.request_id,
            prompt_tokens=sample.prompt_tokens,
            cached_tokens=sample.cached_tokens,
            output_tokens=output_tokens,
            first_token_s=self.first_token_s,
            last_token_s=since(arrived_at, sample.last_token) if output_tokens else NOT_YET,
            ended_s=self._since(sample.ended),
            finish=sample.finish,
            failure=sample.failure,
            attempts=[self._told(attempt) for attempt in self._attempts],
            stalls=self._stalls(sample.last_token),
        )

    def ended(self, now: float) -> None:
        """What ended the sample ended its last attempt, unless that had failed and nothing came after it."""
        if self._attempts and self._attempts[-1].ended is None:
            self._attempts[-1].ended = now

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

    def _told(self, attempt: _Attempt) -> AttemptRecord:
        stages = attempt.stages or Stages()
        return AttemptRecord(
            attempt=attempt.number,
            scheduler=attempt.scheduler,
            prefill=attempt.prefill,
            detokenizer=attempt.detokenizer,
            epoch=attempt.epoch,
            submitted_s=self._since(attempt.submitted),
            accepted_s=self._since(attempt.accepted),
            first_s=self._since(attempt.first),
            ended_s=self._since(attempt.ended),
            queue_s=since(0.0, stages.queue_s),
            grant_s=since(0.0, stages.grant_s),
            prefill_s=since(0.0, stages.prefill_s),
            transfer_s=since(0.0, stages.transfer_s),
            failure=attempt.failure,
            why=attempt.why,
        )

    def _since(self, at: float | None) -> float:
        return NOT_YET if at is None else since(self._arrived_at, at)


class SampleSoFar(NamedTuple):
    """What is known of a sample beside its log; times on the core's clock, `ended` None: it runs.

    Made into a record when somebody looks at it: few of the calls that end are ever looked at.
    """

    log: SampleLog
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    last_token: float
    ended: float | None = None
    finish: str = ""
    failure: str = ""

    def record(self) -> SampleRecord:
        return self.log.record(self)
