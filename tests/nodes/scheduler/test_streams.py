"""Tokens on their way to detokenizers: one frame per step, resends, opens, other detokenizers."""

import pytest

from mesh.address import Address
from mesh.transport.base import Channel
from nodes.protocol import StreamFinish, Submit, TokenBatch
from nodes.request import RequestSpec, Sampling, StopRules
from nodes.scheduler.events import Measured, Outbox, ReadyPeer
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.sequence import Sequence, Stage


class Bench:
    def __init__(self, *ready: str) -> None:
        self.outbox = Outbox()
        self.streams = Streams(self.outbox)
        self.all: list[Sequence] = []
        self.epochs = dict.fromkeys(ready or ("x",), 1)
        self.members()

    def members(self) -> None:
        ready = {name: ReadyPeer("detokenizer", epoch) for name, epoch in self.epochs.items()}
        self.streams.on_members({**ready, "g": ReadyPeer("gateway", 1)}, self.all)

    def sequence(self, row: int, *, outputs: tuple[int, ...] = (), detokenizer: str = "x") -> Sequence:
        submit = Submit(
            request_id=f"r{row}", attempt=0, gateway="g", detokenizer=detokenizer, prompt_ids=[*range(1, 13)],
            output_ids=list(outputs), spec=RequestSpec(Sampling(), StopRules(max_tokens=9)),
        )  # fmt: skip
        one = Sequence.from_submit(row, submit, Address("g", 1), (), 99, 0.0)
        self.all.append(one)
        return one

    def draw(self, *pairs: tuple[Sequence, int]) -> None:
        for one, token in pairs:
            one.token_ids.append(token)
        self.streams.tokens([one for one, _ in pairs])

    def sent(self) -> dict[str, TokenBatch]:
        self.streams.flush()
        commands = [command for command in self.outbox.take() if not isinstance(command, Measured)]
        assert all(command.channel is Channel.DATA for command in commands)
        assert len({command.actor_id for command in commands}) == len(commands)
        return {command.actor_id: command.message for command in commands}


def runs(batch: TokenBatch) -> list[tuple[int, int, list[int]]]:
    found, offset = [], 0
    for stream, position, count in zip(batch.streams, batch.positions, batch.counts, strict=True):
        found.append((stream, position, batch.token_ids[offset : offset + count]))
        offset += count
    return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_frame_per_step_and_detokenizer() -> None:
    bench = Bench("x", "y")
    one, two, three = bench.sequence(1), bench.sequence(2, detokenizer="y"), bench.sequence(3)
    bench.draw((one, 10), (two, 20), (three, 30))
    sent = bench.sent()
    assert (runs(sent["x"]), runs(sent["y"])) == ([(1, 0, [10]), (3, 0, [30])], [(2, 0, [20])])
    assert [(o.stream, o.request_id, o.prompt_tail, o.output_ids) for o in sent["x"].opens] == [
        (1, "r1", list(range(5, 13)), []),
        (3, "r3", list(range(5, 13)), []),
    ]
    bench.draw((one, 11), (two, 21), (three, 31))
    sent = bench.sent()
    assert (runs(sent["x"]), sent["x"].opens) == ([(1, 1, [11]), (3, 1, [31])], [])
    assert bench.sent() == {}


def test_a_later_attempt_opens_with_what_was_delivered(bench: Bench) -> None:
    one = bench.sequence(1, outputs=(7, 8))
    bench.draw((one, 9))
    (batch,) = bench.sent().values()
    assert (batch.opens[0].output_ids, runs(batch)) == ([7, 8], [(1, 2, [9])])


def test_a_finish_travels_with_the_last_token(bench: Bench) -> None:
    one = bench.sequence(1)
    bench.draw((one, 10))
    bench.sent()
    one.token_ids.append(11)
    one.finish_reason = "stop"
    bench.streams.send(one)
    (batch,) = bench.sent().values()
    assert (runs(batch), batch.finishes) == ([(1, 1, [11])], [StreamFinish(1, 2, "stop")])


def test_a_finish_without_any_token(bench: Bench) -> None:
    one = bench.sequence(1)
    one.finish_reason = "length"
    bench.streams.send(one)
    (batch,) = bench.sent().values()
    assert (runs(batch), batch.finishes) == ([], [StreamFinish(1, 0, "length")])


def one_under_way(bench: Bench) -> Sequence:
    """Three of its tokens are sent, a fourth is gathered."""
    one = bench.sequence(1)
    for token in (10, 11, 12):
        bench.draw((one, token))
    bench.sent()
    bench.draw((one, 13))
    return one


def test_a_detokenizer_gets_what_it_lacks(bench: Bench) -> None:
    one = one_under_way(bench)
    bench.streams.resend(one, 1)
    first, second = bench.outbox.take(), bench.sent()
    assert runs(first[0].message) == [(1, 3, [13])], "what was gathered goes first"
    assert runs(second["x"]) == [(1, 1, [11, 12, 13])]
    bench.streams.resend(one, 99)
    assert runs(bench.sent()["x"]) == []


def test_a_gateway_gets_a_new_open_from_where_it_is(bench: Bench) -> None:
    one = one_under_way(bench)
    bench.streams.reopen(one, 2)
    before = bench.outbox.take()
    assert runs(before[0].message) == [(1, 3, [13])]
    batch = bench.sent()["x"]
    assert (batch.opens[0].output_ids, runs(batch)) == ([10, 11], [(1, 2, [12, 13])])
    bench.streams.reopen(one, 99)
    batch = bench.sent()["x"]
    assert (batch.opens[0].output_ids, runs(batch)) == ([10, 11, 12, 13], [])


def test_another_detokenizer_on_request() -> None:
    bench = Bench("x", "y")
    one = bench.sequence(1)
    bench.draw((one, 10))
    bench.sent()
    bench.streams.reopen(one, 0, "y")
    sent = bench.sent()
    assert (sent["x"].closes, runs(sent["y"])) == ([1], [(1, 0, [10])])
    bench.streams.redirect(one, "y")
    assert bench.sent() == {}
    bench.streams.redirect(one, "x")
    assert bench.sent()["y"].closes == [1]
    bench.draw((one, 11))
    assert runs(bench.sent()["x"]) == [(1, 0, [10, 11])]


def test_closing_is_said_once_and_of_ended_streams_with_the_next_tokens(bench: Bench) -> None:
    one, two, never = bench.sequence(1), bench.sequence(2), bench.sequence(3)
    bench.draw((one, 10), (two, 20))
    bench.sent()
    bench.streams.close(one)
    bench.streams.close(one)
    bench.streams.close(never)
    assert bench.sent()["x"].closes == [1]
    two.stage = Stage.ENDED
    bench.streams.close(two)
    assert bench.sent() == {}
    other = bench.sequence(4)
    bench.draw((other, 40))
    assert bench.sent()["x"].closes == [2]


def test_streams_of_a_lost_detokenizer_are_opened_elsewhere() -> None:
    bench = Bench("x", "y", "z")
    one, two, silent = bench.sequence(1), bench.sequence(2, detokenizer="y"), bench.sequence(3)
    bench.draw((one, 10), (two, 20))
    bench.sent()
    bench.streams.on_lost(Address("x", 1), bench.all)
    sent = bench.sent()
    assert list(sent) == ["z"], "rows are spread over those that are left"
    assert runs(sent["z"]) == [(1, 0, [10])]
    del bench.epochs["x"]
    bench.members()
    assert bench.sent() == {}, "it has moved already"
    bench.draw((silent, 30))
    assert runs(bench.sent()["z"]) == [(3, 0, [30])]


def test_the_only_detokenizer_stays_in_use_when_its_link_breaks(bench: Bench) -> None:
    one = bench.sequence(1)
    bench.draw((one, 10))
    bench.streams.on_lost(Address("x", 1), bench.all)
    assert runs(bench.sent()["x"]) == [(1, 0, [10])]
    bench.streams.on_lost(Address("x", 0), bench.all)
    assert bench.sent() == {}, "an earlier incarnation"


def test_a_restarted_detokenizer_knows_nothing() -> None:
    bench = Bench("x", "y")
    one, two = bench.sequence(1), bench.sequence(2, detokenizer="y")
    bench.draw((one, 10), (two, 20))
    bench.sent()
    bench.epochs["x"] = 2
    bench.members()
    assert [(name, runs(batch)) for name, batch in bench.sent().items()] == [("x", [(1, 0, [10])])]


def test_streams_wait_for_the_only_detokenizer_to_come_back() -> None:
    bench = Bench("x")
    one = bench.sequence(1)
    bench.draw((one, 10))
    bench.sent()
    bench.epochs.clear()
    bench.members()
    bench.draw((one, 11))
    assert bench.sent() == {}
    bench.epochs["x"] = 2
    bench.members()
    assert runs(bench.sent()["x"]) == [(1, 0, [10, 11])]


def test_tokens_wait_where_there_is_no_detokenizer() -> None:
    bench = Bench("x")
    bench.epochs.clear()
    bench.members()
    one, done = bench.sequence(1, detokenizer="q"), bench.sequence(2)
    bench.draw((one, 10), (done, 20))
    bench.draw((one, 11))
    bench.streams.reopen(one, 0)
    done.finish_reason = "length"
    bench.streams.send(done)
    bench.sent()
    bench.epochs["y"] = 1
    bench.members()
    batch = bench.sent()["y"]
    assert (runs(batch), batch.finishes) == ([(1, 0, [10, 11]), (2, 0, [20])], [StreamFinish(2, 1, "length")])
