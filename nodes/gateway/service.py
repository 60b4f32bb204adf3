"""Performs what the core decides: asks, tells, and hands output to the writer of its call.

This is the gateway without HTTP: `routes/app.py` drives it for clients, a simulation drives it directly. Owned by the
actor; all calls are made on the event loop's thread.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from secrets import randbits
from typing import Final, NamedTuple, assert_never

from mesh import errors
from mesh.actor import Answer, Context
from mesh.calls.batches import cut
from mesh.calls.persistent_ask import PersistentAsk
from mesh.errors import CallError, MeshError
from mesh.membership.view import Member
from mesh.runtime.driver import CoreDriver
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Channel
from nodes.api_keys.entries import ApiKey
from nodes.gateway.admission.in_flight import InFlight, Place
from nodes.gateway.admission.key_use import KeyUse
from nodes.gateway.admission.named_calls import NamedCalls
from nodes.gateway.asked.answer_form import form_of
from nodes.gateway.asked.asked_once import AskedOnce
from nodes.gateway.asked.vocabulary import vocabulary_of
from nodes.gateway.clients import NOBODY, Client
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BadRequest, Internal, TooManyRequests, Unavailable, error_from
from nodes.gateway.jobs.fan_out import fan_out
from nodes.gateway.jobs.validation import Job
from nodes.gateway.records.account import RequestAccount
from nodes.gateway.records.call_log import CallTrack
from nodes.gateway.request_names import UNNAMED, RequestNames
from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.events import (
    Aborted,
    Accepted,
    AskAlive,
    AskMove,
    AskRoute,
    CancelAcknowledged,
    CancelFailed,
    ClientGone,
    Command,
    Deliver,
    DeliverPrompt,
    DeliverVector,
    DetokenizersChanged,
    End,
    Event,
    Evicted,
    Failure,
    MoveChosen,
    PeerLost,
    RouteChosen,
    RouteFailed,
    SendCancel,
    SendResend,
    SendSubmit,
    Stopping,
    SubmitAccepted,
    SubmitFailed,
    Suspect,
    Tick,
)
from nodes.gateway.requests.outputs import CallOutput, Generation
from nodes.gateway.requests.sample_log import SampleSoFar
from nodes.gateway.requests.scheduler_view import SchedulerView
from nodes.protocol import (
    AttemptsCancelled,
    AttemptsSubmitted,
    CancelAttempts,
    ChooseMoves,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Detokenized,
    MovesChosen,
    Prepare,
    Prepared,
    Resend,
    Route,
    Submit,
    SubmitAttempts,
    TokenizerIs,
)
from nodes.protocol.attempts import OVER_SHARE
from nodes.protocol.records import CallsFound, FindCalls
from nodes.redaction import PromptRedactor
from nodes.request import AttemptRef
from nodes.roles import DETOKENIZER, GATEWAY, SCHEDULER, TOKENIZER, WORKER
from nodes.trace_notes import Noted

ROUTE_TIMEOUT_S = 2.0
"""Less than a hung tokenizer takes to be killed (2.5 s: three heartbeats and 1 s), so another is asked before that."""

# Size of an attempt on the wire without its tokens, and without its stop strings, which are few.
_SUBMIT_BYTES = 1024
_SUBMIT_TIMEOUT_S = 5.0
"""A scheduler answers in its next turn: without an answer for so long, most likely it never had the ask."""

RESERVE: Final = 16
"""One part in so many more than `max_inflight` is for first calls of clients, if all others are being answered and none
can give way any more."""

DrawSeed = Callable[[], int]


def draw_secret_seed() -> int:
    """A seed for a call that brought none: 63 bits that nobody can predict."""
    return randbits(63)


class _Open(NamedTuple):
    """One sample that has not ended: where its output goes, and the names and the record of its call, if it has one."""

    output: CallOutput
    sample: int
    names: RequestNames
    track: CallTrack | None


class GatewayService:
    """The gateway's core with its asks and its outputs."""

    def __init__(self, ctx: Context, config: GatewayConfig, draw_seed: DrawSeed = draw_secret_seed) -> None:
        self.config = config
        self._draw_seed = draw_seed
        self.is_draining = False
        self._turns_away = False
        self.num_calls = self.num_over_share = 0
        self.in_flight = InFlight()
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ctx = ctx
        gateway = ctx.address.actor_id
        self._core = GatewayCore(gateway, config)
        self._driver = CoreDriver[Event, Command](
            self,
            "gateway",
            self._core.handle,
            self._perform,
            setup={"gateway": gateway, "config": config},
            redact=PromptRedactor,
        )
        self._tokenizers = PersistentAsk()
        self.vocabulary = AskedOnce(lambda: self._ask_tokenizer(DescribeVocabulary(), "logprobs"), vocabulary_of)
        self.form = AskedOnce(
            lambda: self._ask_tokenizer(DescribeTemplate(), "messages"), lambda answer: form_of(answer, config)
        )
        self.tokenizer_info = AskedOnce(lambda: self._ask_tokenizer(DescribeTokenizer(), ""), _document_of)
        self.schedulers = SchedulerView(ctx)
        self.named = NamedCalls()
        self.key_use = KeyUse(self._num_gateways, retry_after_s=config.retry_after_s)
        self._outputs: dict[str, _Open] = {}
        # Outputs for which this turn of the loop has brought something, some of them more than once.
        self._fresh: list[CallOutput] = []
        # Attempts that this turn of the loop submits, by scheduler.
        self._submits: dict[str, list[Submit]] = {}
        # Requests for which this turn asks for another group, by the one whose worker is dead.
        self._moves: dict[str, list[AskMove]] = {}
        self._is_flushing = False
        self.account = RequestAccount(ctx, config)
        self._timer = DeadlineTimer(lambda: self.ctx, self._core.next_deadline, lambda _: self.handle(Tick()))
        self._emptied = asyncio.Event()

    def _num_gateways(self) -> int:
        # It is among the members only once the registry has said so.
        return len({self.ctx.address.actor_id, *(member.actor_id for member in self.ctx.members.by_role(GATEWAY))})

    @property
    def core(self) -> GatewayCore:
        return self._core

    def now(self) -> float:
        return self.ctx.now()

    def continue_trace(self, traceparent: str) -> None:
        self.ctx.continue_trace(traceparent)

    def enter_call(self, client: Client = NOBODY, key: ApiKey | None = None) -> Place:
        """Called before the body is read; raises `ApiError` if the call, or another one of `key`, cannot be taken.

        `leave_call` has to be called with what is returned.
        """
        if self._turns_away:
            raise Unavailable("This gateway is draining.", code="draining", retry_after_s=self.config.retry_after_s)
        if key is not None:
            self.key_use.enter(key)
        most, num = self.config.max_inflight, self.in_flight.num_calls
        has_room = num < most or self._make_room(client, 1, 1)
        if not has_room and (self.in_flight.num_of(client) or num >= most + most // RESERVE):
            if key is not None:
                self.key_use.leave(key)
            message = f"{num} calls are in flight, the maximum for this gateway (max_inflight)."
            raise TooManyRequests(message, retry_after_s=self.config.retry_after_s)
        place = Place(client, key)
        self.in_flight.enter(place)
        self.num_calls += 1
        return place

    def _make_room(self, client: Client, size: int, num_needed: int) -> bool:
        """Refuse calls without output of clients that have more than `client`; False if it is the one to be refused."""
        refused = self.in_flight.to_refuse(client, size, num_needed, self._is_new)
        for place in refused or ():
            most, num = self.config.max_inflight, self.in_flight.num_of(place.client)
            message = (
                f"This gateway has as many requests as it may (max_inflight {most}); this client has most of them,"
                f" {num} calls, and the newest of these gives way to another client's: send fewer at once, or try again"
                " later."
            )
            self.in_flight.leave(place)
            self.num_over_share += 1
            # In one event: what is cancelled at a scheduler is one ask then.
            self.handle(Evicted(place.request_ids, Failure(OVER_SHARE, message)))
        return refused is not None

    def _is_new(self, place: Place) -> bool:
        return bool(place.request_ids) and all(map(self._core.is_new, place.request_ids))

    def leave_call(self, place: Place) -> None:
        if place.key is not None:
            self.key_use.leave(place.key)
        self.in_flight.leave(place)
        self.num_calls -= 1
        if self.num_calls == 0:
            self._emptied.set()

    def check_priority(self, priority: int) -> None:
        """Raise `BadRequest` for a priority that a scheduler of the mesh would ignore."""
        if priority and (others := self.schedulers.policies_without_priority()):
            message = (
                f"'priority' is not supported by this server: its schedulers' policy is {others[0] or 'unknown'!r}."
                " Leave it out, or have the operator set policy = 'priority' under [roles.scheduler]."
            )
            raise BadRequest(message, param="priority", code="unsupported_parameter")

    async def prepare(self, question: Prepare, *, prompt_param: str) -> Prepared:
        """Token ids and routes from a tokenizer; raises `ApiError`."""
        note, name = self.ctx.trace.note, question.request_id
        note(Noted.PREPARING, name, _num_prompts(question))
        answer = (await self._ask_tokenizer(question, prompt_param)).message
        if not isinstance(answer, Prepared) or not _fits(question, answer):
            raise Internal("A tokenizer gave an answer that does not match the request.")
        note(Noted.PREPARED, name, sum(map(len, answer.token_ids)), int(answer.elapsed_s * 1e6))
        return answer

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids; raises `ApiError`."""
        question = Detokenize(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        answer = (await self._ask_tokenizer(question, "tokens")).message
        if not isinstance(answer, Detokenized):
            raise Internal("A tokenizer gave an answer that does not match the request.")
        return answer.text

    async def _ask_tokenizer(
        self, question: Prepare | Detokenize | DescribeVocabulary | DescribeTemplate | DescribeTokenizer, param: str
    ) -> Answer:
        timeout_s, patience_s = self.config.prepare_timeout_s, self.config.role_wait_s
        try:
            return await self._tokenizers.ask_any(
                self.ctx, TOKENIZER, question, timeout_s=timeout_s, patience_s=patience_s
            )
        except CallError as error:
            retry_after_s = self.config.retry_after_s
            raise error_from(_failure_of(error), retry_after_s=retry_after_s, default_param=param) from error

    def open(
        self,
        job: Job,
        prepared: Prepared,
        arrived_at: float,
        names: RequestNames = UNNAMED,
        place: Place | None = None,
        track: CallTrack | None = None,
    ) -> Generation:
        """Start all requests of a call; raises `ApiError` if the context, this gateway or its key has no room for them.

        `place` is the call's, from `enter_call`. `abandon` has to be called with both.
        """
        place = place or Place()
        if place.key is not None:
            self.key_use.check_tokens(place.key, prepared.token_ids)
        requests = fan_out(
            job,
            prepared.token_ids,
            prepared.routes,
            seed=self._draw_seed(),
            arrived_at=arrived_at,
            config=self.config,
            words=prepared.words,
            second_from=prepared.second_from,
            client=place.client,
        )
        # Counted in requests here; `enter_call` counts calls, which may have many samples each.
        most, num = self.config.max_inflight, self._core.num_requests
        num_needed = num + len(requests) - most
        # What is larger than the whole gateway would refuse all others for nothing.
        has_room = num_needed <= 0 or (
            len(requests) <= most and self._make_room(place.client, len(requests), num_needed)
        )
        if not has_room and (self.in_flight.num_of(place.client) > 1 or num_needed > most // RESERVE):
            message = f"{num} requests are in flight; {len(requests)} more would exceed the limit of {most}."
            raise TooManyRequests(message, retry_after_s=self.config.retry_after_s)
        samples_per_prompt = len(requests) // len(prepared.token_ids)
        output = CallOutput(
            len(requests),
            whole=not job.stream,
            samples_per_read=samples_per_prompt if job.tokens.prompt_reads is not None else 0,
            hides_output=job.tokens.hides_output,
        )
        generation = Generation(requests, output, len(prepared.token_ids))
        if place.key is not None:
            self.key_use.begin(place.key, generation)
        self.in_flight.opened(place, generation.request_ids)
        if track is not None:
            track.opened(generation)
        for index, request in enumerate(requests):
            self._outputs[request.request_id] = _Open(output, index, names, track)
            self.handle(request)
        return generation

    def abandon(self, generation: Generation, place: Place | None = None) -> None:
        if place is not None:
            if place.key is not None:
                self.key_use.end(place.key, generation)
            self.in_flight.closed(place, generation.request_ids)
        for request_id in generation.request_ids:
            # Mostly all have ended, and the core would be told for nothing.
            if request_id in self._outputs:
                self.handle(ClientGone(request_id))

    def end_aborted(self, request_ids: Iterable[str]) -> int:
        """End those of these requests that are open, with what they have for an answer. How many were."""
        open_ids = [request_id for request_id in request_ids if request_id in self._outputs]
        for request_id in open_ids:
            self.handle(Aborted(request_id))
        return len(open_ids)

    def error_of(self, failure: Failure, param: str) -> ApiError:
        """The answer for a request that failed; `param` is the field that a client would have to change."""
        return error_from(failure, retry_after_s=self.config.retry_after_s, default_param=param)

    def stop(self) -> None:
        """End every request, so that every call gets its error while there is still a connection for it."""
        self.begin_drain(turn_away=True)
        if not self.stopping.done():
            self.stopping.set_result(None)
        self.handle(Stopping())
        # A core that has failed no longer ends any request.
        failure = Failure("shutting_down", "this gateway is shutting down")
        for request_id in list(self._outputs):
            self._end(End(request_id, None, failure, 0, 0, 0, 0.0))
        self._flush()

    def begin_drain(self, *, turn_away: bool) -> None:
        """Stop being ready; with `turn_away`, new calls get a 503."""
        self.is_draining = True
        self._turns_away = turn_away

    async def emptied(self) -> None:
        while self.num_calls:
            # In a loop: a new call may have come between the end of the last one and this task's turn.
            self._emptied.clear()
            await self._emptied.wait()

    def members(self) -> list[Member]:
        return self.ctx.members.all()

    def missing_roles(self) -> list[str]:
        missing = ["this gateway is draining"] if self.is_draining else []
        members = self.ctx.members
        roles = (TOKENIZER, DETOKENIZER, SCHEDULER, WORKER)
        missing += [f"no {role} is ready" for role in roles if not members.by_role(role)]
        groups = {str(member.attributes.get("group", "")) for member in members.by_role(WORKER)}
        paired = [
            scheduler
            for scheduler in members.by_role(SCHEDULER)
            if scheduler.attributes.get("worker_ready", True) and scheduler.attributes.get("group", "") in groups
        ]
        if members.by_role(SCHEDULER) and groups and not paired:
            missing.append("no scheduler has a worker that is ready")
        return missing

    def on_members(self, changes: Iterable[Member]) -> None:
        roles = {member.role for member in changes}
        if roles & {TOKENIZER, SCHEDULER, DETOKENIZER}:
            self._tokenizers.members_changed()
        if DETOKENIZER in roles:
            self.handle(DetokenizersChanged([m.actor_id for m in self.ctx.members.by_role(DETOKENIZER)]))
        if SCHEDULER in roles:
            self.handle(self.schedulers.changed())

    def on_peer_lost(self, actor_id: str, epoch: int, reason: str = "") -> None:
        self.handle(PeerLost(actor_id, epoch, reason))

    def find_calls(self, query: FindCalls) -> CallsFound:
        """Calls under way and ended ones that are still known here."""
        return self.account.find(query, self._sample_so_far)

    def _sample_so_far(self, request_id: str) -> SampleSoFar | None:
        state = self._core.requests.get(request_id)
        return None if state is None else state.so_far()

    def handle(self, event: Event) -> None:
        self._driver.feed(event)
        if (self._fresh or self._submits or self._moves or self.account.num_tokens) and not self._is_flushing:
            # Runs after the frames that have arrived already: a gateway that lags writes what they bring in one piece.
            self._is_flushing = True
            self.ctx.later(0.0, self._flush)
        self._timer.arm()

    def _perform(self, command: Command) -> None:
        match command:
            case Deliver():
                self._deliver(command)
            case DeliverPrompt(request_id, payload):
                output, index, *_ = self._outputs[request_id]
                if output.deliver_prompt(index, payload):
                    self._fresh.append(output)
            case DeliverVector(request_id, vector, num_cached_tokens):
                output, index, *_ = self._outputs[request_id]
                output.deliver_vector(index, vector, num_cached_tokens)
            case Accepted():
                output, index, *_ = self._outputs[command.request_id]
                output.accepted(index)
            case End():
                self._end(command)
            case SendSubmit(scheduler, message):
                self._submits.setdefault(scheduler, []).append(message)
            case SendCancel():
                then, timeout_s = partial(self._on_cancelled, command.scheduler), self.config.cancel_timeout_s
                self.ctx.ask_then(
                    command.scheduler, CancelAttempts(attempts=command.attempts), then, timeout_s=timeout_s
                )
            case SendResend():
                resend = Resend(streams=command.streams, detokenizer=command.detokenizer)
                # On the control channel: a resend must not wait behind what is being sent.
                self.ctx.tell(command.scheduler, resend, channel=Channel.CONTROL)
            case Suspect(scheduler):
                self.ctx.suspect(scheduler)
            case AskAlive(scheduler):
                self.schedulers.ask_alive(scheduler, self.handle)
            case AskMove():
                self._moves.setdefault(command.holder, []).append(command)
            case AskRoute():
                self.ctx.spawn(self._ask_route(command), name="route")
            case _:
                assert_never(command)

    def _deliver(self, command: Deliver) -> None:
        output, index, *_ = self._outputs[command.request_id]
        if command.num_restored_tokens:
            output.restored(index, command.num_restored_tokens)
        if output.deliver(index, command.text, command.num_tokens, command.num_cached_tokens, command.tokens):
            self._fresh.append(output)
        if command.first:
            self.ctx.trace.note(Noted.FIRST, command.request_id, command.num_tokens)
        self.account.delivered(command)

    def _end(self, end: End) -> None:
        one = self._outputs.pop(end.request_id)
        one.output.end(one.sample, end)
        self._fresh.append(one.output)
        status = 0 if end.failure is None else self.error_of(end.failure, "").status
        self.account.ended(end, one.names, status, one.track)

    def _flush(self) -> None:
        self._is_flushing = False
        # One ask for all of a turn: otherwise 256 clients at once mean 256 asks, and as many events of the scheduler's
        # core. The frame carries the first attempt's trace; the others stay with their calls, whose lines we log here.
        submits, self._submits = self._submits, {}
        note = self.ctx.trace.note
        for scheduler, attempts in submits.items():
            for some in cut(attempts, lambda one: _SUBMIT_BYTES + 5 * (len(one.prompt_ids) + len(one.output_ids))):
                for one in some:
                    note(Noted.SUBMITTED, one.request_id, one.attempt, len(one.prompt_ids) + len(one.output_ids))
                then = partial(self._on_submitted, scheduler, some)
                self.ctx.ask_then(scheduler, SubmitAttempts(attempts=some), then, timeout_s=_SUBMIT_TIMEOUT_S)
        moves, self._moves = self._moves, {}
        for asked in moves.values():
            for moving in cut(asked, lambda one: _SUBMIT_BYTES + 5 * len(one.message.token_ids)):
                self.ctx.spawn(self._ask_moves(moving), name="moves")
        fresh, self._fresh = self._fresh, []
        for output in fresh:
            output.flush()
        self.account.flush()

    def _on_submitted(self, scheduler: str, attempts: list[Submit], outcome: Answer | MeshError) -> None:
        failure, was_heard = _unfitting(scheduler), True
        answered: set[tuple[str, int]] = set()
        held: list[AttemptRef] = []
        refused: dict[tuple[str, int], Failure] = {}
        if isinstance(outcome, MeshError):
            failure = _failure_of(outcome)
            was_heard = not isinstance(outcome, errors.PeerLost) or outcome.was_heard
        elif isinstance(outcome.message, AttemptsSubmitted):
            answered = {(attempt.request_id, attempt.attempt) for attempt in outcome.message.held}
            for one in outcome.message.refused:
                refused[one.request_id, one.attempt] = Failure(one.code, one.message, one.retryable, one.param)
        for submit in attempts:
            key = (submit.request_id, submit.attempt)
            self.ctx.trace.note(Noted.ANSWERED, *key, key in answered)
            if key in answered:
                held.append(AttemptRef(*key))
            else:
                # An attempt in neither list may be held all the same: it is cancelled before there is another one.
                self.handle(SubmitFailed(*key, refused.get(key, failure), was_heard))
        if held and not isinstance(outcome, MeshError):
            # One event for all: at 64 clients an answer is about five of them.
            self.handle(SubmitAccepted(held, outcome.sender.actor_id, outcome.sender.epoch))

    def _on_cancelled(self, scheduler: str, outcome: Answer | MeshError) -> None:
        if isinstance(outcome, MeshError):
            # A scheduler that left the mesh sends nothing more, whatever became of this ask.
            lost = outcome.code == "peer_lost" or self.ctx.members.get(scheduler) is None
            self.handle(CancelFailed(scheduler, lost))
        elif isinstance(outcome.message, AttemptsCancelled):
            self.handle(CancelAcknowledged(scheduler, outcome.message.attempts))
        else:
            self.handle(CancelFailed(scheduler, lost=False))

    async def _ask_route(self, command: AskRoute) -> None:
        request_id = command.message.request_id
        self.ctx.trace.note(Noted.ROUTING, request_id, command.attempt)
        try:
            asked = self._tokenizers.ask_any(
                self.ctx, TOKENIZER, command.message, timeout_s=ROUTE_TIMEOUT_S, patience_s=0.0
            )
            answer = (await asked).message
        except CallError as error:
            self.ctx.trace.note(Noted.ROUTED, request_id, command.attempt)
            self.handle(RouteFailed(request_id, command.attempt, _failure_of(error)))
            return
        self.ctx.trace.note(Noted.ROUTED, request_id, command.attempt, isinstance(answer, Route))
        if isinstance(answer, Route):
            self.handle(RouteChosen(request_id, command.attempt, answer))
        else:
            self.handle(RouteFailed(request_id, command.attempt, _unfitting("a tokenizer")))

    async def _ask_moves(self, asked: list[AskMove]) -> None:
        """Requests of one group. Those for which there is no answer stay, and lose nothing by it."""
        note, holder = self.ctx.trace.note, asked[0].holder
        for one in asked:
            note(Noted.ROUTING, one.message.request_id, one.attempt)
        # They were gathered in one turn of the loop: the least time is right for all, and moves none in vain.
        returns_in_s = min(one.returns_in_s for one in asked)
        requests = [one.message for one in asked]
        question = ChooseMoves(holder=holder, returns_in_s=returns_in_s, requests=requests)
        routes: dict[str, Route] = {}
        with contextlib.suppress(CallError):
            answer = await self._tokenizers.ask_any(
                self.ctx, TOKENIZER, question, timeout_s=ROUTE_TIMEOUT_S, patience_s=0.0
            )
            routes = answer.message.routes if isinstance(answer.message, MovesChosen) else routes
        for one in asked:
            request_id = one.message.request_id
            note(Noted.ROUTED, request_id, one.attempt, request_id in routes)
            if (route := routes.get(request_id)) is not None:
                self.handle(MoveChosen(request_id, one.attempt, holder, route))


def _num_prompts(question: Prepare) -> int:
    return len(question.texts or question.token_ids or [None])


def _fits(question: Prepare, answer: Prepared) -> bool:
    """Whether there is something for all that was asked."""
    num_prompts = _num_prompts(question)
    due = (num_prompts, num_prompts if question.route else 0, len(question.words), len(question.seconds or ()))
    return due == tuple(map(len, (answer.token_ids, answer.routes, answer.words, answer.second_from)))


def _document_of(answer: Answer) -> bytes:
    if not isinstance(answer.message, TokenizerIs):
        raise Internal("A tokenizer gave an answer that does not match the request.")
    return answer.message.document


def _failure_of(error: MeshError) -> Failure:
    return Failure(error.code, error.message, error.retryable, error.param)


def _unfitting(who: str) -> Failure:
    return Failure("bad_answer", f"{who} gave an answer that does not match the request")
