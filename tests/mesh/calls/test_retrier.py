"""What is asked again until it is answered."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines

RETRY_S, GIVE_UP_S = 0.5, 30.0
PEERS, KEYS = st.sampled_from("pq"), st.sampled_from("abc")


class Book:
    """A retrier whose asks are written down."""

    def __init__(self, max_pending: int = 9) -> None:
        self.deadlines = Deadlines()
        self.sent: list[tuple[str, list[str]]] = []
        self.retrier = Retrier[str, str](
            self.deadlines, "again", lambda peer, items: self.sent.append((peer, items)), max_pending=max_pending
        )

    def add(
        self,
        key: str,
        peer: str = "p",
        give_up_at: float = GIVE_UP_S,
        item: str = "",
        patient_until: float | None = None,
    ) -> bool:
        return self.retrier.add(
            key, peer, item or key, retry_s=RETRY_S, give_up_at=give_up_at, patient_until=patient_until
        )

    def asked(self, now: float | None = None) -> list[tuple[str, list[str]]]:
        """All asks since the last look: of a flush, or of what is due `now`."""
        if now is None:
            self.retrier.flush()
        else:
            while (key := self.deadlines.pop_due(now)) is not None:
                assert key[0] == "again"
                self.retrier.retry(key[1])
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def book() -> Book:
    return Book()


def test_what_gathered_is_asked_together_and_once(book: Book) -> None:
    assert [book.add(key, peer) for key, peer in (("a", "p"), ("b", "q"), ("c", "p"))] == [True] * 3
    assert book.sent == []
    assert book.asked() == [("p", ["a", "c"]), ("q", ["b"])]
    assert book.asked() == []
    assert len(book.retrier) == 3
    assert book.retrier.get("b") == "b"
    assert book.retrier.get("z") is None


def test_a_failure_is_followed_by_another_ask_until_the_answer(book: Book) -> None:
    book.add("a")
    book.add("b")
    book.asked()
    assert book.retrier.failed(("a", "zzz"), 2.0) == []
    assert book.asked(2.4) == []
    assert book.asked(2.5) == [("p", ["a"])], "the other one is under way"
    assert book.retrier.answered("a") is True
    assert book.retrier.answered("a") is False
    assert "b" in book.retrier
    assert book.retrier.keys_of("p") == ["b"]
    book.add("c")
    assert book.retrier.keys_of("p") == ["b"], "what is fresh has not failed"


def test_what_is_replaced_stopped_or_answered_meanwhile_is_not_asked(book: Book) -> None:
    for key in "abc":
        book.add(key)
    assert book.retrier.stop("c") == "c"
    assert book.asked() == [("p", ["a", "b"])]
    book.retrier.failed("ab", 1.0)
    book.add("a", item="later words")
    book.retrier.answered("b")
    assert book.deadlines.next() is None, "nothing waits for its pause"
    assert book.asked() == [("p", ["later words"])]
    book.add("d")
    book.retrier.stop("d")
    assert book.asked() == []


def test_it_is_given_up_where_no_time_is_left(book: Book) -> None:
    book.add("a", give_up_at=10.0)
    book.add("b", give_up_at=10.1)
    book.asked()
    assert book.retrier.failed("ab", 9.5) == ["a"]
    assert book.retrier.failed("a", 9.6) == []
    assert book.asked(10.0) == [("p", ["b"])]


def test_a_peer_that_is_back_is_asked_without_a_pause_and_one_that_is_lost_not_at_all(book: Book) -> None:
    book.add("a")
    book.add("b", "q")
    book.asked()
    book.retrier.retry_now("p")
    assert book.asked() == [], "it is under way"
    book.retrier.failed("ab", 2.0)
    book.retrier.retry_now("p")
    assert book.asked() == [("p", ["a"])]
    book.retrier.lost("q")
    assert (len(book.retrier), book.deadlines.next()) == (1, None)


def test_what_is_patient_waits_for_company_and_no_longer_than_it_may(book: Book) -> None:
    book.add("a", patient_until=1.0)
    book.add("b", patient_until=1.5)
    book.add("c", "q", patient_until=1.0)
    assert book.asked() == []
    assert book.asked(0.9) == []
    assert book.asked(1.0) == [("p", ["a", "b"]), ("q", ["c"])], "the first one's time is that of all"
    book.add("d", patient_until=2.0)
    book.add("e")
    assert book.asked() == [("p", ["e", "d"])], "it goes along"
    assert book.deadlines.next() is None
    book.add("f", patient_until=3.0)
    book.retrier.answered("f")
    assert book.deadlines.next() is None, "nothing is left to be asked"


def test_in_a_hurry_all_that_is_patient_leaves_and_what_rests_does_not(book: Book) -> None:
    book.add("a", patient_until=1.0)
    book.add("c", "q", patient_until=1.0)
    book.add("z", "rests")
    assert book.asked() == [("rests", ["z"])]
    book.retrier.failed("z", 0.0)
    book.retrier.hurry()
    assert book.asked(0.1) == [("p", ["a"]), ("q", ["c"])]
    assert book.asked(1.5) == [("rests", ["z"])]
    book.retrier.hurry()
    assert book.asked() == []


def test_what_is_patient_waits_as_long_as_what_failed_before(book: Book) -> None:
    book.add("a")
    book.add("b", patient_until=2.1)
    book.add("late", patient_until=2.1)
    assert book.asked() == [("p", ["a", "b", "late"])]
    book.add("b", patient_until=2.1)
    assert book.retrier.failed("a", 2.0) == []
    assert book.asked(2.1) == [], "that peer rests"
    book.add("c", patient_until=2.2)
    book.add("d")
    assert book.asked() == [("p", ["d"])], "others do not rouse it"
    assert book.asked(2.5) == [("p", ["b", "a", "c"])]
    book.add("e", patient_until=3.0)
    assert book.asked(3.0) == [("p", ["e"])]


def test_it_is_bounded() -> None:
    book = Book(max_pending=2)
    assert [book.add(key) for key in "abcb"] == [True, True, False, True]
    assert len(book.retrier) == 2


class Retrying(RuleBasedStateMachine):
    """What is wanted is fresh, under way, or waits for a pause that has a deadline; nothing else is ever asked."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        self.now = 0.0
        self.wanted: dict[str, tuple[str, float]] = {}
        self.fresh: set[str] = set()
        self.under_way: set[str] = set()

    def note_asked(self, sent: list[tuple[str, list[str]]]) -> None:
        for peer, items in sent:
            assert all(self.wanted[key][0] == peer for key in items)
            assert len(set(items)) == len(items)
            assert not self.under_way & set(items)
            self.under_way |= set(items)
            self.fresh -= set(items)

    def forget(self, key: str) -> None:
        self.wanted.pop(key, None)
        self.fresh.discard(key)
        self.under_way.discard(key)

    @rule(key=KEYS, peer=PEERS, patience_s=st.sampled_from([None, 0.05, 0.7]))
    def add(self, key: str, peer: str, patience_s: float | None) -> None:
        self.forget(key)
        patient_until = None if patience_s is None else self.now + patience_s
        self.book.add(key, peer, self.now + GIVE_UP_S, patient_until=patient_until)
        self.wanted[key] = (peer, self.now + GIVE_UP_S)
        if patience_s is None:
            self.fresh.add(key)

    @rule()
    def flush(self) -> None:
        self.note_asked(self.book.asked())
        assert not self.fresh

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), comes=st.booleans())
    def outcome(self, data: st.DataObject, comes: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.under_way)))
        self.under_way.discard(key)
        if comes:
            assert self.book.retrier.answered(key)
            self.forget(key)
        else:
            is_late = self.now + RETRY_S >= self.wanted[key][1]
            assert self.book.retrier.failed((key,), self.now) == [key] * is_late
            if is_late:
                self.forget(key)

    @rule(peer=PEERS)
    def back(self, peer: str) -> None:
        self.book.retrier.retry_now(peer)
        sent, self.book.sent = self.book.sent, []
        self.note_asked(sent)
        assert all(key in self.fresh | self.under_way for key, (of, _) in self.wanted.items() if of == peer)

    @rule(peer=PEERS)
    def lose(self, peer: str) -> None:
        self.book.retrier.lost(peer)
        for key in [key for key, (of, _) in self.wanted.items() if of == peer]:
            self.forget(key)

    @rule(by=st.sampled_from([0.1, 0.5, 31.0]))
    def pass_time(self, by: float) -> None:
        self.now += by
        self.note_asked(self.book.asked(self.now))

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert len(self.book.retrier) == len(self.wanted)
        for key, (peer, _) in self.wanted.items():
            waits = self.book.deadlines.at(("again", peer)) is not None
            assert key in self.fresh or key in self.under_way or waits
        if not self.wanted:
            assert self.book.deadlines.next() is None


TestRetrying = Retrying.TestCase
TestRetrying.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
