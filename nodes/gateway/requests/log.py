"""The log of one request: prompt ids, emitted ids, attempt. All of its state that cannot be rebuilt is here.

Output is accepted contiguously, by output position for tokens and by character offset for text. On the way
output may be lost, repeated and reordered; the log takes what it lacks, drops what it has, and reports a gap:

    position        0 . . . . . len(output_ids) . . . . .
    delta, old        [=======]                              dropped
    delta, overlap          [===|=====]                      its tail is taken
    delta, next                 [=====]                      taken whole
    delta, gap                          [=====]              refused: resend from len(output_ids)

Tokens and text of a delta are taken together or not at all. Text may lag behind tokens (half a character, the start of
a stop string): what a detokenizer holds back depends on the tokens alone, so another one, opened with the same tokens,
continues at the same character. If it does not, the tokens are asked for again from 0.
"""

import enum
from typing import Final, NamedTuple

from nodes.gateway.requests.events import Deliver, DeliverVector, End, Failure, MoveChosen, Opened, Tokens
from nodes.gateway.requests.sample_log import SampleLog
from nodes.numerics import UNKNOWN_BITS, Bits
from nodes.prompt_payloads import PromptPayloads
from nodes.protocol import ChooseRoute, Pooled, Submit, Suspected, TextDelta
from nodes.protocol.records import STALL_S, SampleRecord

MAX_MOVES: Final = 3
"""Without output in between: groups die one after the other under it, or a tokenizer does not know that they do."""


class Phase(enum.IntEnum):
    """Where an attempt stands. A scheduler may hold it in the first two phases only."""

    SUBMITTING = 0
    RUNNING = 1
    ROUTING = 2
    WAITING = 3


class Gap(NamedTuple):
    """Output is missing, and has to be sent again from `position` on."""

    position: int


class RequestState:
    """One request of one client. Written by `GatewayCore` only."""

    __slots__ = (
        "_move",
        "arrived_at",
        "attempt",
        "awaited_epoch",
        "bits",
        "cleared_at",
        "deaths",
        "detokenizer",
        "epoch",
        "excluded",
        "failure",
        "gap_until",
        "has_other_bits",
        "has_progressed",
        "last_at",
        "log",
        "lost_by",
        "num_cached_tokens",
        "num_chars",
        "num_failures",
        "num_ids_before",
        "num_moves",
        "num_resends",
        "num_restored_tokens",
        "num_route_tries",
        "num_tries",
        "opened",
        "output_ids",
        "pace_s",
        "phase",
        "reading",
        "recover_by",
        "resend_at",
        "retry_at",
        "return_by",
        "route",
        "switched",
    )

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.route = opened.route
        self.detokenizer = opened.route.detokenizer
        self.arrived_at = opened.arrived_at
        self.last_at = opened.arrived_at
        self.phase = Phase.SUBMITTING
        self.attempt = 0
        self.epoch = 0
        self.awaited_epoch = 0
        self.output_ids: list[int] = []
        # What is read of the prompt, if anything: kept from attempt to attempt, as the output is.
        self.reading = PromptPayloads(1, len(opened.prompt_ids)) if opened.spec.sampling.reads_prompt else None
        # What the first output ids were computed with, and how; whether later ones were computed otherwise.
        self.bits = UNKNOWN_BITS
        self.has_other_bits = False
        self.pace_s = 0.0
        self.log = SampleLog(opened.arrived_at)
        self.num_chars = 0
        self.num_cached_tokens = self.num_restored_tokens = 0
        self.switched = False
        self.excluded: list[str] = []
        self.failure: Failure | None = None
        self.num_route_tries = 0
        # Attempts since one was taken by a scheduler; attempts that ran and failed since output came last.
        self.num_tries = 0
        self.num_failures = 0
        self.num_ids_before = 0
        self.has_progressed = False
        self.lost_by: set[tuple[str, int]] = set()
        # Workers that died in a step of it without an answer, until it has so many output ids; moves since output came.
        self.deaths = self.cleared_at = self.num_moves = 0
        self._move: MoveChosen | None = None
        self.num_resends = 0
        self.gap_until = 0.0
        self.resend_at = 0.0
        self.retry_at = 0.0
        self.recover_by = 0.0
        self.return_by = 0.0

    @property
    def scheduler(self) -> str:
        return self.route.decode

    @property
    def wants_vector(self) -> bool:
        """Whether it ends with a vector and has no output."""
        return self.opened.spec.is_vector

    @property
    def prompt_position(self) -> int:
        """The first position of the prompt that is still to be read; 0: none is."""
        return 0 if self.reading is None or self.reading.is_whole else self.reading.next

    @property
    def may_move(self) -> bool:
        """Whether it may leave a group whose worker is dead. One that may have killed it moves once."""
        return self.moving is None and self.num_moves < (1 if self.deaths else MAX_MOVES)

    @property
    def moving(self) -> MoveChosen | None:
        """Where it goes once its holder has let go of the present attempt."""
        return self._move if self._move is not None and self._move.attempt == self.attempt else None

    def leave(self, move: MoveChosen) -> None:
        """The holder is asked to let go of it."""
        self._move = move
        self.num_moves += 1

    @property
    def asks_again_at(self) -> float:
        """When its holder is asked for output: if it is to move, that sends nothing more, and need only say so."""
        return self.resend_at if self.moving is None else max(self.resend_at, self.recover_by)

    def suspect(self, suspected: Suspected) -> None:
        """It was in a step that a worker died with, and is believed to be harmless once it has got past it."""
        self.deaths = max(self.deaths, suspected.deaths)
        self.cleared_at = max(self.cleared_at, suspected.cleared_at, len(self.output_ids) + 1)

    def progressed(self) -> None:
        """It has more output: where it was before says nothing about it any more."""
        if not self.deaths or len(self.output_ids) >= self.cleared_at:
            self.deaths = self.cleared_at = self.num_moves = 0

    def due_at(self, timeout_s: float) -> float:
        """When its time is over, or earlier, when a try or resend is due. Output only ever postpones a resend."""
        over_at = self.arrived_at + timeout_s
        if self.phase is Phase.WAITING:
            return min(over_at, self.retry_at)
        return min(over_at, self.asks_again_at) if self.phase is Phase.RUNNING else over_at

    def accept_vector(self, pooled: Pooled, now: float) -> DeliverVector:
        """Take the vector of the present attempt."""
        if pooled.stages is not None:
            self.log.staged(pooled.stages, now)
        if self.attempt == 0:
            # As of output: what a later attempt finds cached was computed for the first one.
            self.num_cached_tokens = pooled.num_cached_tokens
        self.log.first_token(now)
        return DeliverVector(self.opened.request_id, pooled.vector, self.num_cached_tokens)

    def accept(self, delta: TextDelta, now: float) -> Deliver | Gap:
        """Take the new part of a delta of the present attempt; the `Deliver` may be empty."""
        # By position, not by what was asked for: a resend and the output that seemed lost may both come.
        num_known = len(self.output_ids) - delta.position
        if num_known < 0:
            return Gap(len(self.output_ids))
        num_known_chars = self.num_chars - delta.text_offset
        # From 0: only a detokenizer knows which token the missing characters belong to.
        if num_known_chars < 0:
            return Gap(0)
        token_ids = delta.token_ids[num_known:] if num_known else delta.token_ids
        text = delta.text[num_known_chars:] if num_known_chars else delta.text
        self.output_ids.extend(token_ids)
        self.num_chars += len(text)
        if delta.stages is not None:
            self.log.staged(delta.stages, now)
        # A later attempt finds cached what the first one computed: that is no saving to report to the client.
        if delta.attempt == 0 and delta.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.attempt == 0 and delta.stages is not None:
            self.num_restored_tokens = min(delta.stages.restored_tokens, self.num_cached_tokens)
        since_s = now - self.last_at
        first = bool(token_ids) and len(self.output_ids) == len(token_ids)
        # A delta with text alone says nothing about the pace: its tokens came earlier, only the text was held back.
        if token_ids:
            self.last_at = now
            if first:
                self.log.first_token(now)
            else:
                self.log.num_pauses += 1
                if since_s > STALL_S or since_s > self.log.stall_s:
                    self.log.paused(delta.position + num_known, since_s, now)
                # Up at once, down slowly: a slow step among fast ones is still this request's pace.
                self.pace_s = since_s if since_s > self.pace_s else 0.9 * self.pace_s + 0.1 * since_s
        tokens = Tokens(token_ids, delta.extras[num_known:], delta.num_past) if self.opened.shows_tokens else None
        cached = (self.num_cached_tokens, tokens, self.num_restored_tokens)
        return Deliver(self.opened.request_id, text, len(token_ids), since_s, first, *cached)

    def take_bits(self, bits: Bits) -> bool:
        """Note what output was computed with, and how. True if it is the first that was computed otherwise."""
        # Counted once for a request: what matters is that its text is not computed with the same bits throughout.
        if not bits.numerics or bits == self.bits or self.has_other_bits:
            return False
        if not self.bits.numerics:
            self.bits = bits
            return False
        self.has_other_bits = True
        return True

    def fail(self, *, is_lost: bool) -> None:
        """An attempt that a scheduler held has failed. It does not count as a failure if it brought output.

        Nor does another loss of the same incarnation count: it survived the first one, so only links get lost.
        """
        # Else a request of thousands of tokens would be given up in a storm where each attempt brings some of them.
        self.has_progressed = len(self.output_ids) > self.num_ids_before
        if self.has_progressed:
            self.num_failures = 0
        self.num_ids_before = len(self.output_ids)
        lost = (self.scheduler, self.epoch)
        # Epoch 0: it is not known which incarnation had it.
        is_known = is_lost and self.epoch > 0
        if not is_known or lost not in self.lost_by:
            self.num_failures += 1
        if is_known:
            self.lost_by.add(lost)

    def submit(self, gateway: str) -> Submit:
        """If all `max_tokens` are here and only the finish was lost, the last token is left out: the scheduler draws it
        again and ends the request by its own rule, and the log drops the repeated token.
        """
        opened, num_ids = self.opened, self.opened.spec.stop.max_tokens - 1
        return Submit(
            request_id=opened.request_id,
            attempt=self.attempt,
            gateway=gateway,
            detokenizer=self.detokenizer,
            prompt_ids=opened.prompt_ids,
            spec=opened.spec,
            output_ids=self.output_ids[:num_ids],
            # What is read of a prompt comes from the scheduler that has the attempt.
            prefill="" if self.reading is not None else self.route.prefill,
            prompt_position=0 if self.reading is None else self.reading.next,
            deaths=self.deaths,
            cleared_at=self.cleared_at,
        )

    def choose_route(self) -> ChooseRoute:
        return ChooseRoute(
            request_id=self.opened.request_id,
            # Output included: the next scheduler should be one that has pages of all that was computed so far.
            token_ids=[*self.opened.prompt_ids, *self.output_ids],
            extra_key=self.opened.spec.extra_key,
            excluded=list(self.excluded),
            numerics=self.bits.numerics,
            weights=self.bits.weights,
            asks=self.opened.spec.needs,
        )

    def so_far(
        self, now: float | None = None, finish_reason: str | None = None, failure: Failure | None = None
    ) -> SampleRecord:
        """What became of it so far, or, with `now`, in all."""
        return self.log.record(
            self.opened.request_id,
            len(self.opened.prompt_ids),
            self.num_cached_tokens,
            len(self.output_ids),
            last_token=self.last_at,
            ended=now,
            finish=finish_reason or "",
            failure=failure.code if failure is not None else "",
        )

    def end(self, finish_reason: str | None, failure: Failure | None, now: float, stop_string: str = "") -> End:
        """The end as a command, with the counts for usage."""
        # Where no stop string ended it, its last token did.
        stop = stop_string or (self.output_ids[-1] if finish_reason == "stop" and self.output_ids else None)
        return End(
            self.opened.request_id,
            finish_reason,
            failure,
            len(self.opened.prompt_ids),
            len(self.output_ids),
            self.num_cached_tokens,
            now - self.arrived_at,
            self.log.stall_s,
            stop,
            self.so_far(now, finish_reason, failure),
            self.num_restored_tokens,
        )
