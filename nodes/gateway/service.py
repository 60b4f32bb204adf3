"""Performs what the core decides: asks, tells, and hands output to the writer of its call.

This is the gateway without HTTP: `routes/app.py` drives it for clients, a simulation drives it directly. Owned by the
actor; all calls are made on the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from secrets import randbits
from typing import NamedTuple, assert_never

from mesh import errors
from mesh.actor import Answer, Context
from mesh.calls.batches import cut
from mesh.errors import MeshError
from mesh.membership.view import Member
from mesh.runtime.driver import CoreDriver
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Channel
from nodes.gateway.admission.door import Door
from nodes.gateway.admission.in_flight import Place
from nodes.gateway.admission.named_calls import NamedCalls
from nodes.gateway.asked.tokenizers import Tokenizers
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BadRequest, error_from
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
    Failure,
    PeerLost,
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
from nodes.gateway.requests.scheduler_view import SchedulerView
from nodes.protocol import (
    AttemptsCancelled,
    AttemptsSubmitted,
    CancelAttempts,
    Prepared,
    Resend,
    Submit,
    SubmitAttempts,
)
from nodes.protocol.records import CallsFound, FindCalls, SampleRecord
from nodes.redaction import PromptRedactor
from nodes.request import AttemptRef
from nodes.roles import DETOKENIZER, GATEWAY, SCHEDULER, TOKENIZER, WORKER
from nodes.trace_notes import Noted

# Size of an attempt on the wire without its tokens, and without its stop strings, which are few.
_SUBMIT_BYTES = 1024
_SUBMIT_TIMEOUT_S = 5.0
"""A scheduler answers in its next turn: without an answer for so long, most likely it never had the ask."""

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
        self.tokenizers = Tokenizers(ctx, config)
        self.door = Door(config, self._num_gateways, self._core.is_new, self.handle)
        self.schedulers = SchedulerView(ctx)
        self.named = NamedCalls()
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

    def check_priority(self, priority: int) -> None:
        """Raise `BadRequest` for a priority that a scheduler of the mesh would ignore."""
        if priority and (others := self.schedulers.policies_without_priority()):
            message = (
                f"'priority' is not supported by this server: its schedulers' policy is {others[0] or 'unknown'!r}."
                " Leave it out, or have the operator set policy = 'priority' under [roles.scheduler]."
            )
            raise BadRequest(message, param="priority", code="unsupported_parameter")

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

        `place` is the call's, from `Door.enter`. `abandon` has to be called with both.
        """
        place = place or Place()
        if place.key is not None:
            self.door.key_use.check_tokens(place.key, prepared.token_ids)
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
        self.door.admit(place, len(requests), self._core.num_requests)
        samples_per_prompt = len(requests) // len(prepared.token_ids)
        output = CallOutput(
            len(requests),
            whole=not job.stream,
            samples_per_read=samples_per_prompt if job.tokens.prompt_reads is not None else 0,
            hides_output=job.tokens.hides_output,
        )
        generation = Generation(requests, output, len(prepared.token_ids))
        if place.key is not None:
            self.door.key_use.begin(place.key, generation)
        self.door.in_flight.opened(place, generation.request_ids)
        if track is not None:
            track.opened(generation)
        for index, request in enumerate(requests):
            self._outputs[request.request_id] = _Open(output, index, names, track)
            self.handle(request)
        return generation

    def abandon(self, generation: Generation, place: Place | None = None) -> None:
        if place is not None:
            if place.key is not None:
                self.door.key_use.end(place.key, generation)
            self.door.in_flight.closed(place, generation.request_ids)
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
        self.door.begin_drain(turn_away=True)
        if not self.stopping.done():
            self.stopping.set_result(None)
        self.handle(Stopping())
        # A core that has failed no longer ends any request.
        failure = Failure("shutting_down", "this gateway is shutting down")
        for request_id in list(self._outputs):
            self._end(End(request_id, None, failure, 0, 0, 0, 0.0))
        self._flush()

    def members(self) -> list[Member]:
        return self.ctx.members.all()

    def missing_roles(self) -> list[str]:
        missing = ["this gateway is draining"] if self.door.is_draining else []
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
            self.tokenizers.members_changed()
        if DETOKENIZER in roles:
            self.handle(DetokenizersChanged([m.actor_id for m in self.ctx.members.by_role(DETOKENIZER)]))
        if SCHEDULER in roles:
            self.handle(self.schedulers.changed())

    def on_peer_lost(self, actor_id: str, epoch: int, reason: str = "") -> None:
        self.handle(PeerLost(actor_id, epoch, reason))

    def find_calls(self, query: FindCalls) -> CallsFound:
        """Calls under way and ended ones that are still known here."""
        return self.account.find(query, self._sample_so_far)

    def _sample_so_far(self, request_id: str) -> SampleRecord | None:
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
                then, timeout_s = partial(self._on_cancelled, command), self.config.cancel_timeout_s
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

    def _on_cancelled(self, command: SendCancel, outcome: Answer | MeshError) -> None:
        scheduler = command.scheduler
        if isinstance(outcome, MeshError):
            # A scheduler that left the mesh sends nothing more, whatever became of this ask.
            lost = outcome.code == "peer_lost" or self.ctx.members.get(scheduler) is None
            self.handle(CancelFailed(scheduler, lost))
        elif isinstance(outcome.message, AttemptsCancelled):
            self.handle(CancelAcknowledged(scheduler, outcome.message.attempts))
            if len(outcome.message.attempts) < len(command.attempts):
                # Its worker computes some of them, and may die of it: they are asked for again.
                self.handle(CancelFailed(scheduler, lost=False))
        else:
            self.handle(CancelFailed(scheduler, lost=False))

    async def _ask_route(self, command: AskRoute) -> None:
        self.handle(await self.tokenizers.choose_route(command))

    async def _ask_moves(self, asked: list[AskMove]) -> None:
        for chosen in await self.tokenizers.choose_moves(asked):
            self.handle(chosen)


def _failure_of(error: MeshError) -> Failure:
    return Failure(error.code, error.message, error.retryable, error.param)


def _unfitting(who: str) -> Failure:
    return Failure("bad_answer", f"{who} gave an answer that does not match the request")
