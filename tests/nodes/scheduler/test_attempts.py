"""Which attempts are held, kept, and never started again."""

import pytest

from mesh.address import Address
from mesh.runtime.deadlines import Deadlines
from nodes.protocol import Submit
from nodes.request import RequestSpec, Sampling, StopRules
from nodes.scheduler import attempts as module
from nodes.scheduler.attempts import FINISHED, Attempts, Standing
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence

CONFIG = SchedulerConfig(group="m", worker="w", agent="a", context_length=99, max_finished=2)


def submit(request_id: str, attempt: int = 0) -> Submit:
    return Submit(
        request_id=request_id, attempt=attempt, gateway="g", detokenizer="x", prompt_ids=[1],
        spec=RequestSpec(Sampling(), StopRules(max_tokens=1)),
    )  # fmt: skip


def sequence(request_id: str, attempt: int = 0, row: int = 1, epoch: int = 1) -> Sequence:
    return Sequence.from_submit(row, submit(request_id, attempt), Address("g", epoch), (), 99, 0.0)


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


@pytest.fixture
def book(deadlines) -> Attempts:
    return Attempts(CONFIG, deadlines)


def standings(book: Attempts) -> list[Standing]:
    """Of attempts 0, 1 and 2 of one request."""
    return [book.standing(submit("r", attempt)) for attempt in range(3)]


def test_standing(book) -> None:
    assert book.standing(submit("r", 1)) is Standing.NEW
    one = sequence("r", 1)
    book.add(one)
    assert standings(book) == [Standing.OVER, Standing.KNOWN, Standing.NEW]
    assert book.find("r", 1) is one
    assert book.find("r", 0) is None
    assert book.up_to("r", 2) is one
    assert book.up_to("r", 0) is None
    assert book.by_stream(1) is one
    book.forget(one)
    assert standings(book) == [Standing.OVER, Standing.OVER, Standing.NEW]
    assert (len(book), book.by_stream(1)) == (0, None)


def test_gateways_are_told_apart_by_incarnation(book) -> None:
    old, new = sequence("a", row=1, epoch=1), sequence("b", row=2, epoch=2)
    book.add(old)
    book.add(new)
    assert book.of_gateway(Address("g", 1)) == [old]
    assert book.of_gateway(Address("g", 2)) == [old, new]
    assert book.of_gateway(Address("h", 2)) == []


def test_finished_ones_are_kept_for_a_lease(book, deadlines) -> None:
    one = sequence("r")
    book.add(one)
    book.renew(one, 0.0)
    assert deadlines.next() is None, "not finished yet"
    assert book.finish(one, 1.0) == []
    book.renew(one, 3.0)
    assert deadlines.pop_due(12.9) is None
    assert deadlines.pop_due(13.0) == (FINISHED, "r")
    assert book.on_finished_due("r") is one
    book.forget(one)
    assert book.num_finished == 0


def test_only_so_many_are_kept(book) -> None:
    kept = [sequence(f"r{row}", row=row) for row in range(4)]
    for one in kept:
        book.add(one)
    assert [book.finish(one, 0.0) for one in kept] == [[], [], [kept[0]], [kept[0], kept[1]]]


def test_memory_of_what_is_over_is_bounded(book, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    for request_id in "abc":
        book.remember(request_id, 1)
    book.remember("b", 0)
    found = [book.standing(submit(request_id, 1)) for request_id in "abc"]
    assert found == [Standing.NEW, Standing.OVER, Standing.OVER]
