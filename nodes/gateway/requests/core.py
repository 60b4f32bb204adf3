"""The gateway's decisions: which attempt runs where, what is asked for again, when a request ends.

`GatewayCore.handle(event, now)` returns commands; `service.py` performs them and reports back as events. A request ends
exactly once, by `End`. An attempt goes through these phases:

    phase        the core waits for                     it fails when                        then
    SUBMITTING   the scheduler's answer, or output      refused: overloaded, draining, ...   another route, same attempt
                                                        lost: no answer, peer gone           next attempt
    RUNNING      output                                 AttemptFailed, scheduler lost        next attempt
                                                        silence, gap, detokenizer lost       Resend (not a failure)
    ROUTING      a tokenizer's answer                   no route                             WAITING, then again
    WAITING      its time, or its scheduler's return    `recover_by` passes                  End with the failure

A request may have only a few failed attempts (`max_attempts`), so that one which crashes schedulers cannot go on for
long. An attempt does not count as failed if it brought output, if only its link was lost, or if its scheduler was not
there when it was submitted: a dead scheduler stays a member until its lease ends or its successor joins, and it may
come back until `recover_by`. Nor does one that is moved because its group's worker is dead (`moves.py`), nor one that
ended because its group's memory was released: if there is no other group, the request waits for the memory to be
resumed.

Attempts that are over, and attempts whose output comes late, are cancelled at their scheduler until it acknowledges.
"""

from typing import Final, assert_never

from mesh.runtime.deadlines import Deadlines
from nodes.gateway.config import GatewayConfig
from nodes.gateway.requests import cancels, returns
from nodes.gateway.requests.cancels import CancelLedger
from nodes.gateway.requests.events import (
    ABORT,
    Aborted,
    Accepted,
    AskAlive,
    AskRoute,
    CancelAcknowledged,
    CancelFailed,
    ClientGone,
    Command,
    DeliverPrompt,
    DetokenizersChanged,
    Event,
    Evicted,
    Failure,
    GroupAway,
    MoveChosen,
    Opened,
    PeerLost,
    RouteChosen,
    RouteFailed,
    SchedulerAnswered,
    SchedulersChanged,
    SendSubmit,
    Stopping,
    SubmitAccepted,
    SubmitFailed,
    Tick,
)
from nodes.gateway.requests.log import Gap, Phase, RequestState
from nodes.gateway.requests.moves import Moves
from nodes.gateway.requests.peers import Peers
from nodes.gateway.requests.resends import Resends
from nodes.gateway.requests.retrying import (
    DRAINING,
    ELSEWHERE_S,
    FIRST_ROUTE_PAUSE_S,
    MAX_QUIET_S,
    MAX_ROUTE_PAUSE_S,
    NOT_HELD,
    QUIET_PACES,
    pause_before,
)
from nodes.numerics import UNKNOWN_BITS
from nodes.protocol import AttemptFailed, Pooled, PromptRead, Route, TextBatch, TextDelta
from nodes.protocol.attempts import OVER_SHARE
from nodes.protocol.memory import MEMORY_RELEASED
from nodes.request import AttemptRef

REQUEST: Final = "request"
MOVED: Final = "moved"
"""Why an attempt ended that was moved, in the records of its call."""


class GatewayCore:
    """All requests of one gateway."""

    def __init__(self, gateway: str, config: GatewayConfig) -> None:
        self._gateway = gateway
        self._config = config
        self.requests: dict[str, RequestState] = {}
        self._commands: list[Command] = []
        # For each request the earliest time that it waits for. Output only postpones that, so it moves nothing here.
        self._deadlines = Deadlines()
        self._cancels = CancelLedger(
            self._deadlines, lambda cancel: self._commands.append(cancel), give_up_s=config.recovery_timeout_s
        )
        self.next_deadline = self._deadlines.next
        self._peers = Peers()
        self.resends = Resends(config, self._peers)
        self.moves = Moves(self._peers)
        self.num_retries = 0
        self.num_refused = 0
        self.num_numerics_changes = 0

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def is_new(self, request_id: str) -> bool:
        """Whether a request is here that has no output yet."""
        state = self.requests.get(request_id)
        return state is not None and not state.output_ids

    @property
    def num_waiting(self) -> int:
        return sum(state.phase is not Phase.RUNNING for state in self.requests.values())

    @property
    def num_cancels(self) -> int:
        return len(self._cancels)

    @property
    def is_idle(self) -> bool:
        return not self.requests and not len(self._cancels)

    def handle(self, event: Event, now: float) -> list[Command]:
        self._commands = []
        self._dispatch(event, now)
        if self.resends.streams:
            self._commands.extend(self.resends.take())
        self._cancels.flush()
        return self._commands

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case TextBatch():
                for delta in event.deltas:
                    self._on_delta(delta, now)
            case PromptRead():
                self._on_prompt_read(event, now)
            case Pooled():
                self._on_pooled(event, now)
            case AttemptFailed():
                self._on_attempt_failed(event, now)
            case Opened():
                self._on_opened(event, now)
            case SubmitAccepted():
                self._on_accepted(event, now)
            case SubmitFailed():
                self._on_submit_failed(event, now)
            case RouteChosen() | RouteFailed():
                self._on_route(event, now)
            case GroupAway():
                self._on_away(event, now)
            case MoveChosen():
                self._on_move(event, now)
            case CancelAcknowledged():
                self._on_cancelled(event, now)
            case CancelFailed():
                if event.lost:
                    self._cancels.lost(event.scheduler)
                else:
                    self._cancels.failed(event.scheduler, now)
            case PeerLost():
                self._on_peer_lost(event, now)
            case SchedulerAnswered():
                for state in self.requests.values():
                    if returns.is_there(state, event):
                        self._go_back(state, now)
            case DetokenizersChanged():
                self._peers.take(event)
            case SchedulersChanged():
                self._peers.take(event)
                for state in self.requests.values():
                    self._on_return(state, now)
            case ClientGone():
                if (state := self.requests.get(event.request_id)) is not None:
                    self._end(state, None, None, now)
            case Aborted():
                if (state := self.requests.get(event.request_id)) is not None:
                    self._end(state, ABORT, None, now)
            case Evicted():
                for state in [one for name in event.request_ids if (one := self.requests.get(name)) is not None]:
                    self._end(state, None, event.failure, now)
            case Stopping():
                failure = Failure("shutting_down", "this gateway is shutting down")
                for state in list(self.requests.values()):
                    self._end(state, None, failure, now)
            case Tick():
                while (key := self._deadlines.pop_due(now)) is not None:
                    self._on_due(*key, now)
            case _:
                assert_never(event)

    def _on_delta(self, delta: TextDelta, now: float) -> None:
        state = self.requests.get(delta.request_id)
        if state is None or delta.attempt < state.attempt or state.phase > Phase.RUNNING:
            self.num_refused += 1
            if delta.scheduler:
                self._cancels.add(delta.scheduler, delta.request_id, delta.attempt, now)
            return
        if delta.attempt > state.attempt:
            self.num_refused += 1
            return
        if state.phase is Phase.SUBMITTING:
            self._run(state, now)
        if state.reading is not None and state.prompt_position:
            # It was told before this, and is lost or late. Without it the output may not even begin.
            self.resends.after_gap(state, len(state.output_ids), now)
            self._arm(state)
            return
        news = state.accept(delta, now)
        if isinstance(news, Gap):
            self.resends.after_gap(state, news.position, now)
            self._arm(state)
            return
        if news.num_tokens and len(state.output_ids) > state.opened.spec.stop.max_tokens:
            # The scheduler or the detokenizer is broken.
            failure = Failure("internal", "more tokens arrived than were requested", retryable=False)
            self._end(state, None, failure, now)
            return
        if news.num_tokens or news.text:
            # Of thousands of tokens at most one is the first with other bits: the rest should cost a comparison.
            bits = self._peers.bits.get(state.route.decode, UNKNOWN_BITS)
            if bits != state.bits and news.num_tokens and state.take_bits(bits):
                self.num_numerics_changes += 1
            state.resend_at = now + max(self._config.quiet_s, min(MAX_QUIET_S, QUIET_PACES * state.pace_s))
            state.num_resends = 0
            if state.deaths or state.num_moves:
                state.progressed()
            self._commands.append(news)
        if delta.finish_reason is not None:
            # A stop string is the detokenizer's finding: the scheduler may not know of it yet, and computes on.
            has_ended = not delta.stop_string
            self._end(state, delta.finish_reason, None, now, delta.stop_string, has_ended=has_ended)

    def _attempted(self, event: PromptRead | Pooled | AttemptFailed) -> RequestState | None:
        """The request whose present attempt says this; None for what is late or of nobody."""
        state = self.requests.get(event.request_id)
        is_present = state is not None and state.attempt == event.attempt and state.phase <= Phase.RUNNING
        return state if is_present else None

    def _on_prompt_read(self, event: PromptRead, now: float) -> None:
        state = self._attempted(event)
        if state is None or not state.prompt_position:
            self.num_refused += 1
            return
        if state.phase is Phase.SUBMITTING:
            self._run(state, now)
        assert state.reading is not None, "a position of the prompt is to be read"
        if not state.reading.add(event.position, event.count, event.payload):
            self.resends.after_gap(state, len(state.output_ids), now)
            self._arm(state)
            return
        state.resend_at = now + self._config.quiet_s
        state.num_resends = 0
        self._say_read(state)

    def _on_pooled(self, event: Pooled, now: float) -> None:
        state = self._attempted(event)
        if state is None or not state.wants_vector:
            self.num_refused += 1
            return
        if state.phase is Phase.SUBMITTING:
            self._run(state, now)
        # Told again and again until the attempt is cancelled, which its end does.
        self._commands.append(state.accept_vector(event, now))
        self._end(state, "stop", None, now)

    def _say_read(self, state: RequestState) -> None:
        if state.reading is not None and state.reading.is_whole:
            self._commands.append(DeliverPrompt(state.opened.request_id, state.reading.since(1)))

    def _on_opened(self, event: Opened, now: float) -> None:
        assert event.request_id not in self.requests, "request ids must be unique"
        state = self.requests[event.request_id] = RequestState(event)
        state.recover_by = now + self._config.recovery_timeout_s
        # A prompt of one token has nothing to be read.
        self._say_read(state)
        self._submit(state, now)
        self._arm(state)

    def _submit(self, state: RequestState, now: float) -> None:
        state.phase = Phase.SUBMITTING
        state.epoch = state.awaited_epoch = 0
        route = state.route
        state.log.submitted(state.attempt, route.decode, route.prefill, state.detokenizer, now)
        self._commands.append(SendSubmit(state.scheduler, state.submit(self._gateway)))

    def _run(self, state: RequestState, now: float) -> None:
        state.phase = Phase.RUNNING
        state.resend_at = now + self._config.quiet_s
        state.num_resends = state.num_route_tries = state.num_tries = 0
        state.excluded = []
        self._arm(state)
        self._commands.append(Accepted(state.opened.request_id))

    def _on_accepted(self, event: SubmitAccepted, now: float) -> None:
        for held in event.held:
            self._is_held(held, event, now)

    def _is_held(self, held: AttemptRef, event: SubmitAccepted, now: float) -> None:
        state = self.requests.get(held.request_id)
        if state is None or state.attempt != held.attempt:
            # Ended or given up meanwhile; the cancel may have reached the scheduler before the attempt did.
            self._cancels.add(event.scheduler, held.request_id, held.attempt, now)
            return
        if state.phase is Phase.SUBMITTING:
            self._run(state, now)
        state.epoch = event.epoch
        state.log.accepted(now, event.epoch)
        # Its route was older than the death, and it would wait there.
        self._ask_move(state, now)

    def _on_away(self, event: GroupAway, now: float) -> None:
        for suspected in event.suspects:
            state = self.requests.get(suspected.request_id)
            if state is not None and (state.scheduler, state.attempt) == (event.scheduler, suspected.attempt):
                state.suspect(suspected)
        self.moves.begin(event, now)
        for state in self.requests.values():
            if state.scheduler == event.scheduler:
                self._ask_move(state, now)

    def _ask_move(self, state: RequestState, now: float) -> None:
        if state.phase <= Phase.RUNNING and (asked := self.moves.ask(state, now)) is not None:
            self._commands.append(asked)

    def _on_move(self, event: MoveChosen, now: float) -> None:
        state, holder = self.requests.get(event.request_id), event.holder
        if state is None or state.phase > Phase.RUNNING or (state.attempt, state.scheduler) != (event.attempt, holder):
            return
        # An answer that took too long: the worker should be back.
        if event.route.decode == holder or not state.may_move or not self.moves.remaining_s(holder, now):
            return
        # It goes once its holder has let go of it, and has said how many workers died with it by then.
        state.leave(event)
        self._cancel(state, now)
        # A holder that has not said so by then will not, for the cancel is given up: it is asked for output again.
        state.recover_by = now + self._config.recovery_timeout_s
        self._arm(state)

    def _on_cancelled(self, event: CancelAcknowledged, now: float) -> None:
        self._cancels.acknowledged(event.scheduler, event.attempts)
        for ref in event.attempts:
            self._on_let_go(ref, event.scheduler, now)

    def _on_let_go(self, ref: AttemptRef, holder: str, now: float) -> None:
        """The holder has cancelled an attempt: if it was to move, it does."""
        state = self.requests.get(ref.request_id)
        if state is None or state.phase > Phase.RUNNING or ref.attempt < state.attempt:
            return
        if (move := state.moving) is None or move.holder != holder:
            return
        state.log.failed(MOVED, f"the worker of {holder} is dead", now)
        state.attempt += 1
        self.moves.num_moves += 1
        state.excluded = []
        # As after any attempt: if the group refuses it, there is time to find another, or to go back.
        state.recover_by = now + self._config.recovery_timeout_s
        self._take_route(state, move.route, now)

    def _take_route(self, state: RequestState, route: Route, now: float) -> None:
        state.route = route
        state.detokenizer = route.detokenizer
        state.switched = False
        self._submit(state, now)

    def _on_submit_failed(self, event: SubmitFailed, now: float) -> None:
        state = self.requests.get(event.request_id)
        if state is None or state.attempt != event.attempt or state.phase is not Phase.SUBMITTING:
            return
        code = event.failure.code
        # A request too large for a prefill group's pool may fit the pool of the decode group that it stands in for.
        if code in NOT_HELD or (code == "never_fits" and self._peers.is_stand_in(state.scheduler)):
            state.failure = event.failure
            state.log.failed(code, event.failure.message, now)
            state.excluded.append(state.scheduler)
            if code == DRAINING and state.attempt == 0:
                # Its worker comes back when an operator says so: wait for it as long as for a missing role.
                state.recover_by = min(state.recover_by, state.arrived_at + self._config.role_wait_s)
            self._ask_route(state)
            return
        if code == "attempt_over":
            # It was cancelled there, by us or because we seemed lost: only this attempt number cannot be used again.
            self._next_attempt(state, event.failure._replace(retryable=True), [], now, has_run=False)
            return
        if code != "peer_lost":
            self._cancel(state, now)
        state.epoch = self._peers.epoch_of(state.scheduler)
        # Silence is no sign that the request crashes schedulers; the death of one that received it may be.
        has_run = event.was_heard and code != "deadline_exceeded"
        self._next_attempt(state, event.failure, [state.scheduler], now, has_run=has_run)

    def _on_attempt_failed(self, event: AttemptFailed, now: float) -> None:
        if (state := self._attempted(event)) is None:
            return
        failure = Failure(event.code, event.message or event.code.replace("_", " "), event.retryable)
        # A scheduler that restarted does not know the attempt, but may have its pages: it is as good as any other.
        excluded = [] if event.code == "unknown_attempt" else [state.scheduler]
        # Nor has it run, if it gave up its place to another client's.
        has_run = event.code not in (MEMORY_RELEASED, DRAINING, OVER_SHARE)
        # An operator's command is not a failure of the request, and gives it new time to find a place.
        if event.code in (MEMORY_RELEASED, DRAINING):
            state.recover_by = now + (ELSEWHERE_S if event.code == DRAINING else self._config.recovery_timeout_s)
        self._next_attempt(state, failure, excluded, now, has_run=has_run)

    def _on_peer_lost(self, event: PeerLost, now: float) -> None:
        self._cancels.lost(event.actor_id)
        for state in list(self.requests.values()):
            if state.phase is not Phase.RUNNING:
                continue
            if state.scheduler == event.actor_id and state.epoch <= event.epoch:
                # The answer to the submission may not have come yet.
                state.epoch = event.epoch
                # For operators alone: a reason may quote the last lines of a log.
                state.log.failed("peer_lost", event.reason, now)
                failure = Failure("peer_lost", f"lost {event.actor_id} while it ran the request")
                self._next_attempt(state, failure, [event.actor_id], now)
            elif state.detokenizer == event.actor_id:
                self.resends.resend(state, len(state.output_ids), now, leave=event.actor_id)
                self._arm(state)

    def _next_attempt(
        self, state: RequestState, failure: Failure, excluded: list[str], now: float, *, has_run: bool = True
    ) -> None:
        """Try again, unless too many attempts ran and failed, or none could be placed for too long."""
        state.log.failed(failure.code, failure.message, now)
        if not failure.retryable:
            self._end(state, None, failure, now)
            return
        if has_run:
            # `unknown_attempt` too: a scheduler forgets the attempts of a gateway that it lost.
            state.fail(is_lost=failure.code in ("peer_lost", "unknown_attempt"))
            state.recover_by = now + self._config.recovery_timeout_s
        if state.num_failures >= self._config.max_attempts:
            message = f"gave up after {state.num_failures} attempts; the last error: {failure.message}"
            self._end(state, None, Failure(failure.code, message), now)
            return
        if now >= state.recover_by:
            self._end(state, None, failure, now)
            return
        lost_epoch = state.epoch or self._peers.epoch_of(state.scheduler)
        state.attempt += 1
        state.num_tries += 1
        self.num_retries += 1
        state.failure = failure
        state.excluded = excluded
        if failure.code == "peer_lost" and state.output_ids:
            returns.wait(state, lost_epoch, self._gateway, self._config, now)
            self._commands.append(AskAlive(state.scheduler))
            self._on_return(state, now)
            return
        if pause_s := pause_before(state.num_tries, state.num_failures):
            state.phase = Phase.WAITING
            state.retry_at = now + pause_s
            self._arm(state)
        else:
            self._ask_route(state)

    def _on_return(self, state: RequestState, now: float) -> None:
        if state.awaited_epoch and returns.is_back(state, self._peers):
            self._go_back(state, now)
        elif state.awaited_epoch:
            self._arm(state)

    def _go_back(self, state: RequestState, now: float) -> None:
        state.excluded = []
        if self._peers.has_detokenizer(state.detokenizer):
            state.switched = False
            self._submit(state, now)
        else:
            self._ask_route(state)

    def _ask_route(self, state: RequestState) -> None:
        state.phase = Phase.ROUTING
        state.awaited_epoch = 0
        self._commands.append(AskRoute(state.attempt, state.choose_route()))

    def _on_route(self, event: RouteChosen | RouteFailed, now: float) -> None:
        state = self.requests.get(event.request_id)
        if state is None or state.attempt != event.attempt or state.phase is not Phase.ROUTING:
            return
        if isinstance(event, RouteFailed):
            if event.failure.code == MEMORY_RELEASED:
                # Groups that can serve it are there, and an operator says when: an open request waits for that.
                state.recover_by = max(state.recover_by, now + self._config.recovery_timeout_s)
            self._on_no_route(state, event.failure, now)
        elif event.route.decode in state.excluded:
            # A tokenizer names an excluded scheduler if there is no other; retrying at once would be a busy loop.
            self._on_no_route(state, Failure("no_route", "no other scheduler is accepting requests"), now)
        else:
            self._take_route(state, event.route, now)

    def _on_no_route(self, state: RequestState, failure: Failure, now: float) -> None:
        retryable = failure.retryable
        if retryable and state.failure is not None:
            failure = state.failure
        all_full = failure.code == "overloaded" and state.attempt == 0
        all_full |= failure.code == OVER_SHARE and not state.output_ids
        if not retryable or all_full or now >= state.recover_by:
            self._end(state, None, failure, now)
            return
        # An excluded scheduler may be back by then, and is better than none.
        state.excluded = []
        state.phase = Phase.WAITING
        state.retry_at = now + min(MAX_ROUTE_PAUSE_S, FIRST_ROUTE_PAUSE_S * 2**state.num_route_tries)
        state.num_route_tries += 1
        self._arm(state)

    def _on_due(self, kind: str, subject: str, now: float) -> None:
        if kind == cancels.RETRY:
            self._cancels.retry(subject)
            return
        assert kind == REQUEST, f"unknown kind of deadline: {kind}"
        state = self.requests[subject]
        if now >= state.arrived_at + self._config.request_timeout_s:
            message = f"the request was not finished within {self._config.request_timeout_s:g} s"
            self._end(state, None, Failure("request_timeout", message, retryable=False), now)
            return
        if state.phase is Phase.WAITING and now >= state.retry_at:
            self._ask_route(state)
        elif state.phase is Phase.RUNNING and now >= state.asks_again_at:
            self.resends.ask_again(state, len(state.output_ids), now)
        self._arm(state)

    def _arm(self, state: RequestState) -> None:
        """Set the deadline again: what the request waits for has changed, perhaps to something earlier."""
        self._deadlines.set((REQUEST, state.opened.request_id), state.due_at(self._config.request_timeout_s))

    def _cancel(self, state: RequestState, now: float, *, has_ended: bool = False) -> None:
        self._cancels.add(state.scheduler, state.opened.request_id, state.attempt, now, has_ended=has_ended)

    def _end(
        self,
        state: RequestState,
        finish_reason: str | None,
        failure: Failure | None,
        now: float,
        stop_string: str = "",
        *,
        has_ended: bool = False,
    ) -> None:
        """The only way a request ends. A scheduler that may still hold its attempt is asked to free it.

        `has_ended`: there it runs no more, so that this may wait for others.
        """
        del self.requests[state.opened.request_id]
        self._deadlines.clear((REQUEST, state.opened.request_id))
        if state.phase <= Phase.RUNNING:
            self._cancel(state, now, has_ended=has_ended)
        self._commands.append(state.end(finish_reason, failure, now, stop_string))
