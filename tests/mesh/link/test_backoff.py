from mesh.address import Address
from mesh.link.backoff import ReconnectBackoff

A = Address("a", 1)


def test_pauses_grow_to_a_limit_and_end_with_success():
    backoff = ReconnectBackoff(0.1, 0.5)
    assert backoff.remaining_s(A, 0.0) == 0.0
    seen = []
    for _ in range(4):
        backoff.failed(A, 10.0)
        seen.append(backoff.remaining_s(A, 10.0))
    assert [round(pause, 3) for pause in seen] == [0.1, 0.2, 0.4, 0.5]
    assert backoff.remaining_s(A, 11.0) == 0.0
    backoff.succeeded(A)
    backoff.failed(A, 10.0)
    assert round(backoff.remaining_s(A, 10.0), 3) == 0.1


def test_who_gave_no_answer_is_told_for_a_minute_or_until_it_does():
    backoff = ReconnectBackoff(0.5, 2.0)
    backoff.failed(A, 10.0)
    backoff.failed(A, 12.0)
    assert backoff.failing(13.0) == {A: 3.0}, "since the first failure"
    assert backoff.failing(74.0) == {}, "nobody has tried since, so nobody knows"
    backoff.succeeded(A)
    assert backoff.failing(13.0) == {}


def test_only_so_many_are_remembered():
    backoff = ReconnectBackoff(1.0, 1.0)
    for number in range(2000):
        backoff.failed(Address(f"p{number}", 1), 0.0)
    assert backoff.remaining_s(Address("p0", 1), 0.0) == 0.0
    assert backoff.remaining_s(Address("p1999", 1), 0.0) == 1.0
