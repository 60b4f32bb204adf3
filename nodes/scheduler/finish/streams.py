"""Open streams at detokenizers: one columnar frame per step and detokenizer, with absolute output positions.

A stream is opened with the first token it has to send. Tokens that a detokenizer may have missed are sent again on
request: for the detokenizer from the position that it lacks, for a gateway by a new open at the gateway's position.
If the detokenizer is lost, its streams are opened at another one; with none alive, tokens wait in their sequences.

An end or stop token is sent and counted like any other (usage counts it, as OpenAI's servers do); reason `stop` tells
the detokenizer not to show it. Pure; owned by the core, which calls `flush` once per wake.
"""

from collections.abc import Iterable, Mapping

from mesh.address import Address
from mesh.transport.base import Channel
from nodes.protocol import Pooled, PromptRead, StreamFinish, StreamOpen, TokenBatch
from nodes.roles import DETOKENIZER
from nodes.scheduler.events import Measured, Outbox, ReadyPeer
from nodes.scheduler.sequence import Sequence, Stage

MAX_CLOSES = 1024
"""32 KB of row ids. A token may be long in going there; a detokenizer that misses some forgets by its own limit."""
PROMPT_TAIL_TOKENS = 8
"""Prompt ids that a stream is opened with: more than the bytes of a character that the first output may end."""


MOST_PROMPT_BYTES = 1 << 18
"""Of what was read of a prompt, in one message: a prompt of 32,768 tokens may have 5.5 MB, which would hold up others
in its link."""


class _Batch:
    __slots__ = ("closes", "counts", "extras", "finishes", "opens", "positions", "streams", "token_ids")

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.positions: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.opens: list[StreamOpen] = []
        self.finishes: list[StreamFinish] = []
        self.closes: list[int] = []
        # By index of the token in the batch.
        self.extras: dict[int, bytes] = {}

    def message(self) -> TokenBatch:
        return TokenBatch(
            streams=self.streams,
            positions=self.positions,
            counts=self.counts,
            token_ids=self.token_ids,
            opens=self.opens,
            finishes=self.finishes,
            closes=self.closes,
            extras=[self.extras.get(at, b"") for at in range(len(self.token_ids))] if self.extras else [],
        )


class Streams:
    """Tokens on their way to detokenizers."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._batches: dict[str, _Batch] = {}
        # Ended streams that a detokenizer may forget. Not urgent: they go with the next tokens for it.
        self._closes: dict[str, list[int]] = {}
        self._ready: dict[str, int] = {}
        # Time of the event being handled; set by the core, so that it is not passed along for every token.
        self.now = 0.0

    def tokens(self, sequences: Iterable[Sequence]) -> None:
        """Send the one new token of each of these, or more if its stream is not open. The hot path of `send`."""
        name, batch = "", None
        for sequence in sequences:
            position = sequence.num_sent
            token_ids = sequence.token_ids
            # Cheap tests tell the usual row, of one new token in an open stream, from those that need `send`.
            if not sequence.is_open or position != len(token_ids) - sequence.num_prompt_tokens - 1:
                self.send(sequence)
                continue
            if batch is None or sequence.detokenizer != name:
                name = sequence.detokenizer
                batch = self._batch(name)
            batch.streams.append(sequence.row_id)
            batch.positions.append(position)
            batch.counts.append(1)
            if sequence.extras and (extra := sequence.extras.get(position)):
                batch.extras[len(batch.token_ids)] = extra
            batch.token_ids.append(token_ids[-1])
            sequence.num_sent = position + 1

    def send(self, sequence: Sequence) -> None:
        """Send all unsent tokens, opening the stream first if need be, and the finish, if there is one."""
        if not sequence.is_open and not self._open(sequence, sequence.num_prior_outputs):
            return
        batch = self._batch(sequence.detokenizer)
        self._add_tokens(batch, sequence, sequence.num_sent)
        if sequence.finish_reason:
            finish = StreamFinish(sequence.row_id, sequence.num_output_tokens, sequence.finish_reason)
            batch.finishes.append(finish)

    def read(self, sequence: Sequence, start: int, count: int, payload: bytes) -> None:
        """A row from `start` on has read these payloads of its prompt: tell the gateway what it has not been told."""
        reading = sequence.reading
        if reading is not None:
            first = reading.next
            reading.add(start + 1, sequence.num_read_by(start, count), payload)
            self.tell_read(sequence, first)

    def tell_read(self, sequence: Sequence, position: int) -> None:
        """Tell the gateway what was read of the prompt from `position` on; any of it may be lost."""
        reading = sequence.reading
        if reading is None or (position := max(position, reading.begin)) >= reading.next:
            return
        payload, most = reading.since(position), max(1, MOST_PROMPT_BYTES // reading.size)
        for first in range(position, reading.next, most):
            count = min(most, reading.next - first)
            begin = (first - position) * reading.size
            some = payload[begin : begin + count * reading.size]
            said = PromptRead(
                request_id=sequence.request_id, attempt=sequence.attempt, position=first, count=count, payload=some
            )
            self._outbox.tell(sequence.gateway.actor_id, said, Channel.DATA)

    def tell_vector(self, sequence: Sequence) -> None:
        """Tell the gateway the vector, if there is one yet; it may be lost."""
        if not sequence.vector:
            return
        if sequence.stages is None:
            self._outbox.add(Measured(sequence.measure(self.now)))
        pooled = Pooled(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            vector=sequence.vector,
            num_cached_tokens=max(0, sequence.num_cached_tokens),
            stages=sequence.stages,
        )
        # 2 to 16 KB each, hundreds at a time: a cancel must not wait behind them.
        self._outbox.tell(sequence.gateway.actor_id, pooled, Channel.DATA)

    def close(self, sequence: Sequence) -> None:
        """Nobody wants the stream any more, whether it has ended or not."""
        if not sequence.is_open:
            return
        sequence.is_open = False
        if sequence.stage is Stage.ENDED:
            closes = self._closes.setdefault(sequence.detokenizer, [])
            closes.append(sequence.row_id)
            del closes[:-MAX_CLOSES]
        else:
            self._batch(sequence.detokenizer).closes.append(sequence.row_id)

    def resend(self, sequence: Sequence, position: int) -> None:
        self._flush(sequence.detokenizer)
        sequence.num_sent = max(0, min(position, sequence.num_output_tokens))
        self.send(sequence)

    def reopen(self, sequence: Sequence, position: int, detokenizer: str = "") -> None:
        """Open again, with the outputs before `position` as delivered; at another detokenizer if one is named."""
        if detokenizer and detokenizer != sequence.detokenizer:
            self.close(sequence)
            sequence.detokenizer = detokenizer
        # Opens come first in a frame, so tokens gathered earlier for the stream must not share a frame with its open.
        self._flush(sequence.detokenizer)
        if self._open(sequence, max(0, min(position, sequence.num_output_tokens))):
            self.send(sequence)

    def redirect(self, sequence: Sequence, detokenizer: str) -> None:
        """Nothing new to send, but later tokens go to another detokenizer."""
        if detokenizer != sequence.detokenizer:
            self.close(sequence)
            sequence.detokenizer = detokenizer
            sequence.num_sent = sequence.num_prior_outputs

    def on_members(self, ready: Mapping[str, ReadyPeer], sequences: Iterable[Sequence]) -> None:
        """Detokenizers came, went, or restarted: open streams elsewhere that were at lost ones, or at none."""
        before = self._ready
        self._ready = {actor_id: peer.epoch for actor_id, peer in sorted(ready.items()) if peer.role == DETOKENIZER}
        if self._ready == before:
            return
        for sequence in sequences:
            epoch = self._ready.get(sequence.detokenizer)
            if epoch is None or epoch != before.get(sequence.detokenizer, epoch) or not sequence.is_open:
                self._move(sequence)

    def on_lost(self, detokenizer: Address, sequences: Iterable[Sequence]) -> None:
        """A detokenizer died or was cut off. If it is the only one it stays in use: the link may be back at once."""
        # Old news: its successor is known already, and the streams were opened there.
        if self._ready.get(detokenizer.actor_id, 0) > detokenizer.epoch:
            return
        self._batches.pop(detokenizer.actor_id, None)
        self._closes.pop(detokenizer.actor_id, None)
        if len(self._ready) > 1:
            self._ready.pop(detokenizer.actor_id, None)
        for sequence in sequences:
            if sequence.detokenizer == detokenizer.actor_id:
                self._move(sequence)

    def flush(self) -> None:
        for detokenizer in list(self._batches):
            self._flush(detokenizer)

    # inside

    def _open(self, sequence: Sequence, position: int) -> bool:
        """False if there is no detokenizer; the tokens then wait for one."""
        sequence.is_open = False
        sequence.num_sent = position
        if sequence.detokenizer not in self._ready:
            if not self._ready:
                return False
            # Spread over those that are left; any stream may go to any of them.
            sequence.detokenizer = list(self._ready)[sequence.row_id % len(self._ready)]
        sequence.is_open = True
        if sequence.stages is None:
            self._outbox.add(Measured(sequence.measure(self.now)))
        num_prompt = sequence.num_prompt_tokens
        tail = sequence.token_ids[max(0, num_prompt - PROMPT_TAIL_TOKENS) : num_prompt]
        self._batch(sequence.detokenizer).opens.append(
            StreamOpen(
                stream=sequence.row_id,
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                gateway=sequence.gateway.actor_id,
                stop=sequence.spec.stop,
                prompt_tail=tail.tolist(),
                output_ids=sequence.token_ids[num_prompt : num_prompt + position].tolist(),
                num_cached_tokens=max(0, sequence.num_cached_tokens),
                skip_special_tokens=sequence.spec.skip_special_tokens,
                stages=sequence.stages,
                shown_ids=sequence.spec.shown_ids,
            )
        )
        return True

    def _move(self, sequence: Sequence) -> None:
        """Open at another detokenizer a stream of a lost one; if it has nothing to send, it is opened once it has."""
        sequence.is_open = False
        sequence.num_sent = sequence.num_prior_outputs
        if sequence.num_output_tokens > sequence.num_prior_outputs or sequence.finish_reason:
            self.send(sequence)

    def _add_tokens(self, batch: _Batch, sequence: Sequence, position: int) -> None:
        tokens = sequence.token_ids[sequence.num_prompt_tokens + position :]
        if tokens:
            batch.streams.append(sequence.row_id)
            batch.positions.append(position)
            batch.counts.append(len(tokens))
            if sequence.extras:
                at = len(batch.token_ids) - position
                batch.extras |= {at + index: extra for index, extra in sequence.extras.items() if index >= position}
            batch.token_ids.extend(tokens)
        sequence.num_sent = position + len(tokens)

    def _batch(self, detokenizer: str) -> _Batch:
        return self._batches.setdefault(detokenizer, _Batch())

    def _flush(self, detokenizer: str) -> None:
        batch = self._batches.pop(detokenizer, None)
        if batch is not None:
            batch.closes += self._closes.pop(detokenizer, [])
            self._outbox.tell(detokenizer, batch.message(), Channel.DATA)
