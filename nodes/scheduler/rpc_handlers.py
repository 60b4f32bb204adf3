"""What others ask of a scheduler: take or drop attempts, send tokens again, prefill for another scheduler.

Every ask but a flush is answered at once: an attempt is held long before it is computed. If an ask names several items,
each is taken or refused by itself. Repeats are answered like the first; what is over stays over. Pure; owned by the
core.
"""

from collections.abc import Sequence as Items

from mesh.address import Address
from mesh.errors import NOT_SERVED
from mesh.runtime.effects import Asked
from nodes.context_length import over_context
from nodes.protocol import (
    AttemptFailed,
    AttemptRefused,
    AttemptsCancelled,
    AttemptsSubmitted,
    CancelAttempts,
    CancelPrefill,
    FatesFound,
    FindFates,
    FlushCache,
    OrderPrefills,
    PrefillCancelled,
    PrefillOrder,
    PrefillRefused,
    PrefillsOrdered,
    Resend,
    StopAt,
    Submit,
    SubmitAttempts,
)
from nodes.protocol.attempts import OVER_SHARE, UNSUPPORTED_ASK
from nodes.request import MAX_ASK_BYTES, MAX_ASKS, VECTOR_KINDS, VECTORS, AttemptRef, RequestSpec, Sampling
from nodes.scheduler.attempts import Standing
from nodes.scheduler.books import Books
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.flushes import Flushes
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.absence import WorkerAbsence
from nodes.scheduler.worker_link.worker_deaths import WorkerDeaths
from nodes.trace_notes import Noted

Problem = tuple[str, str, bool, str | None]
"""Why something is refused: code, message, whether it may be tried again, and the parameter at fault."""


class RpcHandlers:
    """Answers asks, and handles the tells that request streams again or stop them."""

    def __init__(
        self,
        books: Books,
        orders: PrefillHandoffQueue,
        restores: RestoreQueue,
        streams: Streams,
        endings: Endings,
        deaths: WorkerDeaths,
        absence: WorkerAbsence,
        flushes: Flushes,
    ) -> None:
        self._books = books
        self._orders = orders
        self._restores = restores
        self._streams = streams
        self._endings = endings
        self._deaths = deaths
        self._absence = absence
        self._flushes = flushes
        self._num_rows = 0
        self.is_draining = False
        self.is_worker_drained = False
        self.num_prompt_tokens = 0
        # Requests refused so that another client's could wait.
        self.num_over_share = 0

    def on_ask(self, event: Asked, now: float) -> None:
        match event.message:
            case SubmitAttempts():
                self._on_submits(event, event.message, now)
            case CancelAttempts():
                self._on_cancel(event, event.message, now)
            case OrderPrefills():
                self._on_orders(event, event.message, now)
            case CancelPrefill():
                for grant_id in event.message.grant_ids:
                    self._orders.cancel(grant_id, now)
                self._books.outbox.reply(event.call, PrefillCancelled(grant_ids=event.message.grant_ids))
            case FindFates():
                fates = self._restores.fates.find(event.message.request_ids)
                self._books.outbox.reply(event.call, FatesFound(fates=fates))
            case FlushCache():
                self._flushes.ask(event.call, now)
            case _:
                kind = type(event.message).__name__
                self._books.outbox.refuse(event.call, NOT_SERVED, f"a scheduler does not answer {kind}")

    def on_resend(self, sender: Address, message: Resend, now: float) -> None:
        """Send tokens again: to a detokenizer those that it lacks, for a gateway by opening the stream again."""
        for gap in message.streams:
            sequence = self._books.attempts.find(gap.request_id, gap.attempt)
            if sequence is None:
                self._books.outbox.tell(sender.actor_id, _unknown(gap.request_id, gap.attempt))
                continue
            self._books.attempts.renew(sequence, now)
            if sequence.is_vector:
                # It has no stream to be opened again: the vector is the whole answer, and was lost.
                self._streams.tell_vector(sequence)
                continue
            if gap.prompt_position > 0:
                self._streams.tell_read(sequence, gap.prompt_position)
            # For any other sender, such as a gateway, the stream is opened again: only an open lets its tokens start
            # from another position.
            is_detokenizer = sender.actor_id == sequence.detokenizer and sequence.is_open
            if is_detokenizer and gap.position > 0 and not message.detokenizer:
                self._streams.resend(sequence, gap.position)
            elif sequence.num_output_tokens > gap.position or sequence.finish_reason:
                self._streams.reopen(sequence, gap.position, message.detokenizer)
            elif message.detokenizer:
                self._streams.redirect(sequence, message.detokenizer)
        for stream in message.streams_unknown:
            sequence = self._books.attempts.by_stream(stream)
            if sequence is not None and sequence.detokenizer == sender.actor_id:
                self._books.attempts.renew(sequence, now)
                self._streams.reopen(sequence, sequence.num_prior_outputs)

    def on_stop(self, message: StopAt, now: float) -> None:
        for ref in message.attempts:
            sequence = self._books.attempts.find(ref.request_id, ref.attempt)
            if sequence is not None:
                self._endings.stop(sequence, now)

    # inside

    def _on_submits(self, event: Asked, message: SubmitAttempts, now: float) -> None:
        held: list[AttemptRef] = []
        refused: list[AttemptRefused] = []
        # Each one sees the queue with those before it already in it.
        for submit in message.attempts:
            refusal = self._submit(event.sender, submit, now)
            if refusal is None:
                held.append(AttemptRef(submit.request_id, submit.attempt))
            else:
                code, text, retryable, param = refusal
                refused.append(
                    AttemptRefused(
                        request_id=submit.request_id,
                        attempt=submit.attempt,
                        code=code,
                        message=text,
                        retryable=retryable,
                        param=param,
                    )
                )
        self._books.outbox.reply(event.call, AttemptsSubmitted(held=held, refused=refused))

    def _submit(self, sender: Address, submit: Submit, now: float) -> Problem | None:
        standing = self._books.attempts.standing(submit)
        if standing is Standing.KNOWN:
            # The answer was lost. Only accept it again: a second sequence would draw the same tokens twice.
            return None
        if standing is Standing.OVER:
            return "attempt_over", f"attempt {submit.attempt} has ended here, or a later one replaced it", False, None
        problem = self._problem_of(submit)
        # What is wrong for good is said before a drain: no worker that is started again would take it, so that clients
        # would wait in vain. A scheduler that ends may be followed by one with more room.
        if self.is_draining or (self.is_worker_drained and (problem is None or problem[2])):
            # Clients read this if no other group takes the request either.
            return "draining", f"no worker group can take this request now: {self._what_drains}", True, None
        if problem is not None:
            return problem
        if len(self._books.queue) >= self._books.config.max_waiting and (problem := self._make_place(submit.spec, now)):
            return problem
        older = self._books.attempts.up_to(submit.request_id, submit.attempt)
        # The gateway has given the older attempt up, or it would not submit a higher number.
        if older is not None:
            self._endings.cancel(older, now)
        self._take(sender, submit, now)
        return None

    def _make_place(self, spec: RequestSpec, now: float) -> Problem | None:
        """The queue is full: the newest of whoever has most in it is refused, or, as returned, this one."""
        most, num_own = self._books.config.max_waiting, self._books.queue.num_waiting_of(spec.client)
        if not num_own < len(self._books.queue):
            return "overloaded", f"{most} requests are already waiting; try again later or elsewhere", True, None
        newest = self._books.queue.newest_of_heaviest(spec.client, spec.weight)
        self.num_over_share += 1
        if newest is None:
            return OVER_SHARE, _over_share(most, num_own), True, None
        num = self._books.queue.num_waiting_of(newest.spec.client)
        self._endings.fail(newest, OVER_SHARE, _over_share(most, num), True, now)
        return None

    def _take(self, sender: Address, submit: Submit, now: float) -> None:
        # If another actor submits for the gateway, its epoch is not known: the loss of any incarnation counts.
        gateway = sender if sender.actor_id == submit.gateway else Address(submit.gateway, 0)
        sequence = Sequence.from_submit(
            self._next_row(), submit, gateway, self._books.config.eos_token_ids, self._books.config.context_length, now
        )
        sequence.is_private = self._books.config.is_encoder
        self._books.attempts.add(sequence)
        self._books.outbox.note(Noted.ARRIVED, sequence.request_id, sequence.attempt, sequence.num_tokens)
        self.num_prompt_tokens += sequence.num_prompt_tokens
        # A retry that brings all its tokens, only the finish having been lost: nothing is left to compute. A vector's
        # prompt is all that it may ever have, and is yet to be computed.
        if sequence.num_tokens >= sequence.max_length and not sequence.is_vector:
            self._endings.finish(sequence, "length", now)
        else:
            self._books.queue.add(sequence)
            self._deaths.arrived(sequence)
            self._restores.look(sequence, now)

    def _on_cancel(self, event: Asked, message: CancelAttempts, now: float) -> None:
        for ref in message.attempts:
            sequence = self._books.attempts.up_to(ref.request_id, ref.attempt)
            if sequence is not None:
                self._endings.cancel(sequence, now)
            # Even if it is not known: its submission may arrive after this.
            self._books.attempts.remember(ref.request_id, ref.attempt)
        uncertain = self._absence.may_die_of(message.attempts, now)
        gone = [ref for ref in message.attempts if ref not in uncertain] if uncertain else message.attempts
        self._books.outbox.reply(event.call, AttemptsCancelled(attempts=gone))

    def _on_orders(self, event: Asked, message: OrderPrefills, now: float) -> None:
        accepted: list[str] = []
        refused: list[PrefillRefused] = []
        for order in message.orders:
            refusal = self._order(event.sender, order, now)
            if refusal is None:
                accepted.append(order.grant_id)
            else:
                refused.append(PrefillRefused(grant_id=order.grant_id, code=refusal))
        self._books.outbox.reply(event.call, PrefillsOrdered(accepted=accepted, refused=refused))

    def _order(self, sender: Address, message: PrefillOrder, now: float) -> str | None:
        """Take an order, or renew it; the error code if it is refused."""
        if message.grant_id in self._orders:
            self._orders.renew(sender, message, now)
            return None
        refusal = self._orders.refusal(message)
        problem = self._problem(message.token_ids, [], 1) or self._problem_of_asks(message.spec.sampling)
        if refusal is None and (self.is_draining or self.is_worker_drained):
            refusal = "draining"
        if refusal is None and problem is not None:
            refusal = problem[0]
        if refusal is not None:
            return refusal
        sequence = Sequence.from_order(self._next_row(), message, now)
        self._orders.accept(sender, message, sequence, now)
        self._books.queue.add(sequence)
        self._deaths.arrived(sequence)
        self._restores.look(sequence, now)
        return None

    def _problem_of(self, submit: Submit) -> Problem | None:
        """Why this attempt can never be served here; None if it can."""
        spec = submit.spec
        # Nothing is drawn for a vector: its last token takes a page, too, and none follows.
        max_tokens = 0 if spec.is_vector else spec.stop.max_tokens
        problem = self._problem(submit.prompt_ids, submit.output_ids, max_tokens)
        if problem := problem or self._problem_of_asks(spec.sampling):
            return problem
        if self._books.config.is_encoder and not spec.is_vector:
            return UNSUPPORTED_ASK, "the model of this group makes vectors only", False, None
        if spec.is_vector and (spec.kind not in VECTOR_KINDS or not self._worker_can(VECTORS)):
            return UNSUPPORTED_ASK, f"the worker of this group makes no vectors of kind {spec.kind!r}", True, None
        return None

    def _problem(self, prompt_ids: Items[int], output_ids: Items[int], max_tokens: int) -> Problem | None:
        """Why these tokens can never be served here; None if they can."""
        # The very last token that is drawn is never an input, so it takes no page.
        cache, context_length = self._books.cache, self._books.config.context_length
        limit = min(context_length, cache.num_pages * cache.page_size + bool(max_tokens))
        if not prompt_ids:
            return "empty_prompt", "the prompt must have at least one token", False, "prompt"
        if len(prompt_ids) > limit - bool(max_tokens):
            return "never_fits", over_context(limit, "prompt", len(prompt_ids)), False, "prompt"
        # Until a worker is adopted nobody knows how large the vocabulary is; below 0 is wrong for any.
        vocab_size = 0 if self._books.worker is None else self._books.worker.vocab_size
        for ids in (prompt_ids, output_ids):
            if ids and (min(ids) < 0 or (vocab_size and max(ids) >= vocab_size)):
                valid = f"in 0..{vocab_size - 1}" if vocab_size else "0 or more"
                return "bad_token_id", f"a token id is not {valid}", False, "prompt"
        # Output beyond the context length is cut off, since a gateway may assume a longer one; output beyond the pool
        # is refused.
        if min(len(prompt_ids) + max_tokens, context_length) > limit:
            return "never_fits", over_context(limit, "prompt", len(prompt_ids), max_tokens), False, "max_tokens"
        return None

    def _problem_of_asks(self, sampling: Sampling) -> Problem | None:
        """Why the worker here would not draw as the request asks."""
        asks = sampling.asks
        num_bytes = sum(len(asked.value) for asked in asks)
        if len(asks) > MAX_ASKS or num_bytes > MAX_ASK_BYTES:
            what = f"{len(asks)} asks with {num_bytes} bytes"
            return "bad_asks", f"{what} are too many: at most {MAX_ASKS} with {MAX_ASK_BYTES} are taken", False, None
        for asked in asks:
            if not self._worker_can(asked.name):
                return UNSUPPORTED_ASK, f"the worker of this group cannot do {asked.name!r}", True, None
        return None

    def _worker_can(self, ask: str) -> bool:
        """While it is not known, it may: a row that it cannot draw then fails by itself."""
        return self._books.worker is None or ask in self._books.worker.asks

    @property
    def _what_drains(self) -> str:
        return f"its {'scheduler ends' if self.is_draining else 'worker was drained by the operator'}"

    def _next_row(self) -> int:
        self._num_rows += 1
        return self._num_rows


def _over_share(most: int, num: int) -> str:
    return (
        f"{most} requests wait at this scheduler, its limit (max_waiting), {num} of them of this client,"
        " which has had its part: send fewer at once, or try again later"
    )


def _unknown(request_id: str, attempt: int) -> AttemptFailed:
    return AttemptFailed(
        request_id=request_id,
        attempt=attempt,
        code="unknown_attempt",
        message="this scheduler does not hold this attempt",
    )
