"""The gateway's core against a mesh that loses, repeats and reorders everything, and dies.

A model of the ring answers the core's commands: it knows each request's whole output, plays schedulers and
detokenizers, and puts every message on a wire from which a drawn script delivers, drops and repeats. In the end the
wire is healed and time runs: every request ends exactly once, with the whole text or with a stated failure, and nobody
holds an attempt any more.
"""

import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.config import GatewayConfig
from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.events import (
    Accepted,
    AskRoute,
    CancelAcknowledged,
    CancelFailed,
    ClientGone,
    Deliver,
    DetokenizersChanged,
    End,
    Event,
    Failure,
    Opened,
    PeerLost,
    RouteChosen,
    RouteFailed,
    SchedulersChanged,
    SendCancel,
    SendResend,
    SendSubmit,
    SubmitAccepted,
    SubmitFailed,
    Tick,
)
from nodes.protocol import AttemptFailed, Route, Submit, TextBatch, TextDelta
from nodes.request import AttemptRef, RequestSpec, Sampling, StopRules

SCHEDULERS = ("d0", "d1")
DETOKENIZERS = ("t0", "t1")
TEXTS = ("a", "bc", "", "déf", "g\n")


def token_ids_of(number: int, length: int) -> list[int]:
    return [number * 100 + position for position in range(length)]


def text_before(number: int, position: int) -> str:
    return "".join(TEXTS[(number + i) % len(TEXTS)] for i in range(position))


@dataclass
class Attempt:
    """What a scheduler holds: it has produced output up to `position`.

    `cut`: the gateway was told that the scheduler is lost, which it is not. `forgetful`: its present detokenizer shows
    what the one before held back as already delivered, until it decodes from the start.
    """

    submit: Submit
    number: int
    length: int
    position: int
    cut: bool = False
    forgetful: bool = False

    def delta(self, scheduler: str, start: int) -> TextDelta:
        ids = token_ids_of(self.number, self.length)
        finished = self.position == self.length
        # Text lags one token behind until the end, as with half a character.
        end = self.position if finished else max(self.position - 1, 0)
        begin = start if self.forgetful else max(start - 1, 0)
        shown = text_before(self.number, end)
        offset = min(len(text_before(self.number, begin)), len(shown))
        return TextDelta(
            request_id=self.submit.request_id, attempt=self.submit.attempt, position=start,
            token_ids=ids[start : self.position], text_offset=offset, text=shown[offset:],
            finish_reason="length" if finished else None, scheduler=scheduler,
        )  # fmt: skip


@dataclass
class Client:
    length: int
    text: str = ""
    num_tokens: int = 0
    accepted: bool = False
    left: bool = False
    ends: list[End] = field(default_factory=list)


class Ring:
    def __init__(self) -> None:
        config = GatewayConfig(model_name="m", context_length=1000, recovery_timeout_s=20.0, max_attempts=5)
        self.core = GatewayCore("g", config)
        self.now = 0.0
        self.wire: list[Event] = []
        self.clients: dict[str, Client] = {}
        self.held: dict[str, dict[str, Attempt]] = {name: {} for name in SCHEDULERS}
        self.epochs = dict.fromkeys(SCHEDULERS, 1)
        self.numbers = itertools.count()
        self.feed(DetokenizersChanged(list(DETOKENIZERS)))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            match command:
                case Accepted():
                    self.clients[command.request_id].accepted = True
                case Deliver():
                    client = self.clients[command.request_id]
                    assert not client.ends, "output after the end"
                    assert client.accepted
                    client.text += command.text
                    client.num_tokens += command.num_tokens
                case End():
                    self.clients[command.request_id].ends.append(command)
                case SendSubmit():
                    self.submit(command)
                case AskRoute():
                    self.wire.append(self.route(command))
                case SendCancel():
                    for ref in command.attempts:
                        attempt = self.held[command.scheduler].get(ref.request_id)
                        if attempt is not None and attempt.submit.attempt <= ref.attempt:
                            del self.held[command.scheduler][ref.request_id]
                    self.wire.append(CancelAcknowledged(command.scheduler, command.attempts))
                case SendResend():
                    self.resend(command)

    def submit(self, command: SendSubmit) -> None:
        message = command.message
        number = int(message.request_id)
        known = self.held[command.scheduler].get(message.request_id)
        assert known is None or known.submit.attempt < message.attempt, "an attempt number is used for one scheduler"
        length = self.clients[message.request_id].length
        assert message.output_ids == token_ids_of(number, length)[: len(message.output_ids)]
        assert len(message.output_ids) < length, "nothing is left to draw, so nothing would be sent"
        self.held[command.scheduler][message.request_id] = Attempt(message, number, length, len(message.output_ids))
        self.wire.append(
            SubmitAccepted(
                [AttemptRef(message.request_id, message.attempt)], command.scheduler, self.epochs[command.scheduler]
            )
        )

    def route(self, command: AskRoute) -> Event:
        free = [name for name in SCHEDULERS if name not in command.message.excluded]
        if not free:
            return RouteFailed(command.message.request_id, command.attempt, Failure("no_route", "none"))
        route = Route(decode=free[0], detokenizer="t0")
        return RouteChosen(command.message.request_id, command.attempt, route)

    def resend(self, command: SendResend) -> None:
        for stream in command.streams:
            attempt = self.held[command.scheduler].get(stream.request_id)
            if attempt is None or attempt.submit.attempt != stream.attempt:
                failed = AttemptFailed(
                    request_id=stream.request_id, attempt=stream.attempt, code="unknown_attempt", retryable=True
                )
                self.wire.append(failed)
            elif attempt.position >= stream.position:
                attempt.forgetful = stream.position > 0 and (attempt.forgetful or bool(command.detokenizer))
                self.wire.append(TextBatch(deltas=[attempt.delta(command.scheduler, stream.position)]))

    def step(self, scheduler: str, num_tokens: int) -> None:
        deltas: list[TextDelta] = []
        for attempt in self.held[scheduler].values():
            if attempt.position < attempt.length:
                start = attempt.position
                attempt.position = min(attempt.length, start + num_tokens)
                deltas.append(attempt.delta(scheduler, start))
        if deltas:
            self.wire.append(TextBatch(deltas=deltas))

    def open(self, n: int) -> None:
        request_id = str(next(self.numbers))
        self.clients[request_id] = Client(length=1 + n % 12)
        opened = Opened(
            request_id=request_id, prompt_ids=[1, 2], spec=RequestSpec(Sampling(), StopRules(1 + n % 12)),
            route=Route(decode=SCHEDULERS[n % 2], detokenizer="t0"), arrived_at=self.now,
        )  # fmt: skip
        self.feed(opened)

    def produce(self, n: int) -> None:
        for scheduler in SCHEDULERS:
            self.step(scheduler, 1 + n % 2)

    def deliver_next(self, n: int) -> None:
        for event in self.wire[: 1 + n % 3]:
            self.wire.remove(event)
            self.feed(event)

    def deliver_any(self, n: int) -> None:
        if self.wire:
            self.feed(self.wire.pop(n % len(self.wire)))

    def repeat(self, n: int) -> None:
        if self.wire:
            self.feed(self.wire[n % len(self.wire)])

    def drop(self, n: int) -> None:
        """What is told may be lost; an ask always gets an answer, if only a deadline."""
        if not self.wire:
            return
        event = self.wire.pop(n % len(self.wire))
        if isinstance(event, SubmitAccepted):
            lost = Failure("deadline_exceeded", "no answer")
            self.wire += [SubmitFailed(one.request_id, one.attempt, lost) for one in event.held]
        elif isinstance(event, CancelAcknowledged):
            self.wire.append(CancelFailed(event.scheduler, lost=False))
        elif isinstance(event, RouteChosen):
            self.wire.append(RouteFailed(event.request_id, event.attempt, Failure("no_route", "no tokenizer")))
        elif not isinstance(event, TextBatch | AttemptFailed):
            self.wire.append(event)

    def kill_scheduler(self, n: int) -> None:
        scheduler = SCHEDULERS[n % 2]
        self.held[scheduler].clear()
        self.epochs[scheduler] += 1
        if n % 3:
            self.feed(PeerLost(scheduler, self.epochs[scheduler] - 1))
        self.wire.append(SchedulersChanged(dict(self.epochs)))

    def cut_off(self, n: int) -> None:
        scheduler = SCHEDULERS[n % 2]
        for attempt in self.held[scheduler].values():
            attempt.cut = True
        self.feed(PeerLost(scheduler, self.epochs[scheduler]))

    def kill_detokenizer(self, n: int) -> None:
        self.feed(PeerLost(DETOKENIZERS[n % 2], 1))

    def fail_attempt(self, n: int) -> None:
        held = self.held[SCHEDULERS[n % 2]]
        if held:
            request_id = sorted(held)[n % len(held)]
            attempt = held.pop(request_id).submit.attempt
            self.wire.append(AttemptFailed(request_id=request_id, attempt=attempt, code="worker_lost"))

    def leave(self, n: int) -> None:
        if self.clients:
            request_id = sorted(self.clients)[n % len(self.clients)]
            self.clients[request_id].left = True
            self.feed(ClientGone(request_id))

    def wait(self, n: int) -> None:
        self.now += n / 50
        self.feed(Tick())

    def check(self) -> None:
        for request_id, client in self.clients.items():
            assert text_before(int(request_id), client.length).startswith(client.text)
            assert len(client.ends) <= 1

    def heal(self) -> None:
        for _ in range(1200):
            for event in self.wire[:]:
                self.wire.remove(event)
                self.feed(event)
            self.produce(0)
            self.now += 0.25
            self.feed(Tick())
            if not self.wire and self.core.is_idle:
                break

    def check_end(self) -> None:
        for request_id, client in self.clients.items():
            assert len(client.ends) == 1, (request_id, client)
            end = client.ends[0]
            if end.finish_reason is not None:
                assert client.text == text_before(int(request_id), client.length)
                assert client.num_tokens == end.num_output_tokens == client.length
            else:
                assert client.left or (end.failure is not None and self.core.num_retries >= 4)
        assert self.core.is_idle
        for held in self.held.values():
            for attempt in held.values():
                assert attempt.cut, "a scheduler holds an attempt that nobody wants"
                assert attempt.position == attempt.length, "a scheduler still works for nobody"


WEIGHTS = {
    "produce": 12, "deliver_next": 14, "deliver_any": 4, "repeat": 4, "drop": 2, "open": 2, "wait": 2,
    "kill_scheduler": 1, "cut_off": 1, "kill_detokenizer": 1, "fail_attempt": 1, "leave": 1,
}  # fmt: skip
ACTIONS = st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 99)), min_size=30, max_size=120))
def test_every_request_ends_once_with_the_right_text(script: list[tuple[str, int]]) -> None:
    ring = Ring()
    ring.open(11)
    for action, n in script:
        getattr(ring, action)(n)
        ring.check()
    ring.heal()
    ring.check_end()
