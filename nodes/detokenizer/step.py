"""What one `TokenBatch` does to the streams of its scheduler, and what is to be sent for it. Rules: `core.py`. Pure."""

from collections.abc import Mapping

from nodes.detokenizer.stream import NEVER, Stream
from nodes.protocol import ResendFrom, StreamFinish, TextDelta, TokenBatch
from nodes.request import AttemptRef

_MAX_ASKED = 4096


class Sender:
    """What is known of one incarnation of a scheduler."""

    __slots__ = ("asked_at", "streams")

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.asked_at: dict[int, float] = {}
        """When each unknown stream was last asked for."""


class Step:
    """One batch being taken. The results: deltas by gateway, what to ask the scheduler for, streams that ended."""

    __slots__ = ("_interval_s", "_now", "_scheduler", "_sender", "deltas", "ended", "gaps", "stops", "unknown")

    def __init__(self, sender: Sender, scheduler: str, now: float, interval_s: float) -> None:
        self._sender = sender
        self._scheduler = scheduler
        self._now = now
        self._interval_s = interval_s
        self.deltas: dict[str, list[TextDelta]] = {}
        self.gaps: list[ResendFrom] = []
        self.unknown: list[int] = []
        self.stops: list[AttemptRef] = []
        self.ended: list[tuple[int, Stream]] = []

    def take_tokens(self, batch: TokenBatch) -> None:
        """Give each stream its tokens. Streams that finish in this batch are shown by `take_finishes`."""
        finishes = {finish.stream: finish for finish in batch.finishes}
        streams, token_ids, scheduler, now = self._sender.streams, batch.token_ids, self._scheduler, self._now
        extras = batch.extras
        start = 0
        for number, position, count in zip(batch.streams, batch.positions, batch.counts, strict=True):
            stream, end = streams.get(number), start + count
            if stream is None:
                self._ask_unknown(number)
            elif count == 1 and position == stream.plain_position and number not in finishes:
                stream.touched_at = now
                beside = extras[start:end] if extras else []
                self._add(stream.gateway, stream.show_one(token_ids[start], scheduler, beside))
            else:
                stream.touched_at = now
                self._take_run(number, stream, position, token_ids[start:end], extras[start:end], finishes)
            start = end

    def take_finishes(self, batch: TokenBatch) -> None:
        """End streams whose last token is here, and answer repeated finishes."""
        for finish in batch.finishes:
            stream = self._sender.streams.get(finish.stream)
            if stream is None:
                self._ask_unknown(finish.stream)
                continue
            stream.touched_at = self._now
            if stream.last is not None:
                self._add(stream.gateway, stream.last)
                continue
            stream.begin(finish.position)
            if stream.finish_reason is None and finish.position > stream.position:
                self._ask_gap(stream)
            elif stream.finish_reason is None:
                stream.finish(finish.reason)
            self._show(finish.stream, stream)

    def _take_run(
        self,
        number: int,
        stream: Stream,
        position: int,
        token_ids: list[int],
        extras: list[bytes],
        finishes: Mapping[int, StreamFinish],
    ) -> None:
        stream.begin(position)
        finish = finishes.get(number)
        num_known = max(stream.position - position, 0)
        new_tokens = token_ids[num_known:]
        if stream.finish_reason is not None:
            if new_tokens and finish is None and self._may_ask(stream):
                self._ask_stop(stream)
        elif position > stream.position:
            self._ask_gap(stream)
        else:
            hidden_at = finish.position - 1 if finish is not None and finish.reason == "stop" else -1
            stream.take(new_tokens, extras[num_known:], hidden_at)
            if stream.finish_reason is not None and finish is None:
                self._ask_stop(stream)
        if finish is None:
            self._show(number, stream)

    def _show(self, number: int, stream: Stream) -> None:
        delta = stream.delta(self._scheduler)
        if delta is not None:
            self._add(stream.gateway, delta)
            if delta.finish_reason is not None:
                self.ended.append((number, stream))

    def _add(self, gateway: str, delta: TextDelta) -> None:
        deltas = self.deltas.get(gateway)
        if deltas is None:
            self.deltas[gateway] = [delta]
        else:
            deltas.append(delta)

    def _ask_gap(self, stream: Stream) -> None:
        if self._may_ask(stream):
            self.gaps.append(ResendFrom(stream.request_id, stream.attempt, stream.position))

    def _ask_stop(self, stream: Stream) -> None:
        stream.asked_at = self._now
        self.stops.append(AttemptRef(stream.request_id, stream.attempt))

    def _ask_unknown(self, number: int) -> None:
        asked_at = self._sender.asked_at
        if self._now - asked_at.get(number, NEVER) < self._interval_s:
            return
        if len(asked_at) >= _MAX_ASKED:
            asked_at.clear()
        asked_at[number] = self._now
        self.unknown.append(number)

    def _may_ask(self, stream: Stream) -> bool:
        """Whether its scheduler has not been asked about this stream lately; counts as asking."""
        if self._now - stream.asked_at < self._interval_s:
            return False
        stream.asked_at = self._now
        return True
