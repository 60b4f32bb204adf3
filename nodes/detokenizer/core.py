"""Which text goes to which gateway: the pure core of the detokenizer.

Streams are soft state: everything here can be rebuilt from a `StreamOpen` and the tokens after it. A stream goes

    open --tokens--> open --stop string, or the scheduler's finish--> ended --closed, or quiet for a lease--> forgotten

Tokens are accepted only at the stream's `position`: tokens that it has had are dropped; after a gap or for an unknown
stream they are asked for again, at most every `resend_interval_s`. An ended stream answers a repeated finish with its
last delta, and tokens after a stop string with `StopAt`. Text is a function of token ids alone, so a stream opened
again sends the same text at the same offsets, and the gateway drops what it has. Called by
`nodes/detokenizer/actor.py`.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple, assert_never

from mesh.address import Address
from nodes.detokenizer.config import DetokenizerLimits
from nodes.detokenizer.incremental import DecoderFactory
from nodes.detokenizer.step import Sender, Step
from nodes.detokenizer.stream import Stream
from nodes.protocol import Resend, StopAt, StreamOpen, TextBatch, TokenBatch


class TokensArrived(NamedTuple):
    """A scheduler's step."""

    scheduler: Address
    batch: TokenBatch


class SchedulerLost(NamedTuple):
    """An incarnation of a scheduler is gone or cut off; if it comes back it is asked to open its streams again."""

    scheduler: Address


class LeaseTick(NamedTuple):
    """Time has passed: forget streams whose lease is over."""


class SendText(NamedTuple):
    """Tell a gateway."""

    gateway: str
    message: TextBatch


class SendToScheduler(NamedTuple):
    """Tell one incarnation of a scheduler."""

    scheduler: Address
    message: Resend | StopAt


Event = TokensArrived | SchedulerLost | LeaseTick
Command = SendText | SendToScheduler


class MalformedBatch(ValueError):
    """The columns of a `TokenBatch` do not fit each other; nothing of it has been taken."""


class DetokenizerCore:
    """All streams of one detokenizer. One `TextBatch` per gateway comes out of each `TokenBatch`."""

    def __init__(self, decoders: DecoderFactory, limits: DetokenizerLimits) -> None:
        self._decoders = decoders
        self._limits = limits
        self._senders: dict[Address, Sender] = {}
        self._ended: deque[tuple[Sender, int, Stream]] = deque()
        self.num_resends = 0
        """Gaps and unknown streams that were reported to schedulers."""
        self.num_dropped = 0
        """Streams forgotten because there were too many."""

    @property
    def num_streams(self) -> int:
        """Streams that are open or ended recently."""
        return sum(len(sender.streams) for sender in self._senders.values())

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event; returns what to send. Raises MalformedBatch. `now` is any monotonic clock, seconds."""
        match event:
            case TokensArrived():
                return self._take_batch(event.scheduler, event.batch, now)
            case SchedulerLost():
                self._senders.pop(event.scheduler, None)
            case LeaseTick():
                self._end_leases(now)
            case _:
                assert_never(event)
        return []

    def _end_leases(self, now: float) -> None:
        for sender in self._senders.values():
            over = [n for n, stream in sender.streams.items() if stream.touched_at + self._limits.lease_s <= now]
            for number in over:
                del sender.streams[number]
        while self._ended and self._ended[0][0].streams.get(self._ended[0][1]) is not self._ended[0][2]:
            self._ended.popleft()

    def _take_batch(self, scheduler: Address, batch: TokenBatch, now: float) -> list[Command]:
        # Before anything is taken: half a batch could be neither kept nor asked for again.
        _check_columns(batch)
        sender = self._senders.get(scheduler) or self._add_sender(scheduler)
        if sender is None:
            return []
        # First, since this same batch may have their first tokens.
        for opening in batch.opens:
            self._open(sender, opening, now)
        step = Step(sender, scheduler.actor_id, now, self._limits.resend_interval_s)
        step.take_tokens(batch)
        step.take_finishes(batch)
        # Last: a stream may end and be closed in one batch, and its end has to go out first.
        for number in batch.closes:
            sender.streams.pop(number, None)
            sender.asked_at.pop(number, None)
        for number, stream in step.ended:
            self._remember_ended(sender, number, stream)
        return self._commands(scheduler, step)

    def _commands(self, scheduler: Address, step: Step) -> list[Command]:
        commands: list[Command] = [SendText(gateway, TextBatch(deltas=d)) for gateway, d in step.deltas.items()]
        if step.stops:
            commands.append(SendToScheduler(scheduler, StopAt(attempts=step.stops)))
        if step.gaps or step.unknown:
            self.num_resends += len(step.gaps) + len(step.unknown)
            commands.append(SendToScheduler(scheduler, Resend(streams=step.gaps, streams_unknown=step.unknown)))
        return commands

    def _add_sender(self, scheduler: Address) -> Sender | None:
        """None for an incarnation older than one that has been heard already."""
        known = [address for address in self._senders if address.actor_id == scheduler.actor_id]
        if any(address.epoch > scheduler.epoch for address in known):
            return None
        # Stream numbers belong to one incarnation: those of an earlier one would be taken for new streams.
        for address in known:
            del self._senders[address]
        sender = self._senders[scheduler] = Sender()
        return sender

    def _open(self, sender: Sender, opening: StreamOpen, now: float) -> None:
        decoder = self._decoders.decoder(opening.skip_special_tokens, opening.prompt_tail)
        sender.streams[opening.stream] = Stream(opening, decoder, now)
        sender.asked_at.pop(opening.stream, None)
        if self.num_streams > self._limits.max_streams:
            self._drop_idle()

    def _drop_idle(self) -> None:
        streams = [(s.touched_at, n, sender) for sender in self._senders.values() for n, s in sender.streams.items()]
        streams.sort(key=lambda entry: entry[:2])
        # A sixteenth at once, so that not every open has to search again.
        for _, number, sender in islice(streams, max(1, self._limits.max_streams // 16)):
            del sender.streams[number]
            self.num_dropped += 1

    def _remember_ended(self, sender: Sender, number: int, stream: Stream) -> None:
        self._ended.append((sender, number, stream))
        if len(self._ended) > self._limits.max_ended_streams:
            sender, number, stream = self._ended.popleft()
            if sender.streams.get(number) is stream:
                del sender.streams[number]


def _check_columns(batch: TokenBatch) -> None:
    num_streams = len(batch.streams)
    if len(batch.positions) != num_streams or len(batch.counts) != num_streams:
        raise MalformedBatch("streams, positions and counts have different lengths")
    if sum(batch.counts) != len(batch.token_ids) or min(batch.counts, default=0) < 0:
        raise MalformedBatch(f"counts do not add up to the {len(batch.token_ids)} token ids")
    if batch.extras and len(batch.extras) != len(batch.token_ids):
        raise MalformedBatch(f"{len(batch.extras)} extras for {len(batch.token_ids)} token ids")
    if min(batch.positions, default=0) < 0:
        raise MalformedBatch("a position is negative")
