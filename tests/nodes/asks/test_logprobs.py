"""Logprobs as an ask: what a worker is told to read, and the payload that comes back."""

import pytest

from nodes.asks import DrawnModel, RowReads, asked, open_asks
from nodes.asks.logprobs import UNLIKELIEST, Likelihoods, Logprobs, MalformedPayload, finite
from nodes.worker.draw.reads import certain, packed

MODEL = DrawnModel(vocab_size=100)


def test_a_worker_reads_what_was_asked_for() -> None:
    opened = open_asks(asked([Logprobs(3, [7, 5], processed=True)]), MODEL)
    assert opened == ((), RowReads(3, (7, 5), "processed"), "", None)
    assert open_asks(asked([Logprobs()]), MODEL).reads == RowReads(0, (), "raw")


def test_what_a_worker_packs_is_read() -> None:
    reads = Likelihoods(RowReads(2, (9, 8, 9)))
    payload = packed(-0.5, 3, [(8, -0.25), (15, float("-inf"))], [-1.5, -0.25, -1.5])
    # 8 is among the most likely already, and 9 is named twice.
    assert reads.read(payload) == (-0.5, [(8, -0.25), (15, UNLIKELIEST), (9, -1.5)])
    assert Likelihoods(RowReads(0)).read(packed(float("nan"), 1, [], [])) == (UNLIKELIEST, [])
    drawn = certain(4, RowReads(3, (6,)))
    assert Likelihoods(RowReads(3, (6,))).read(drawn) == (
        0.0,
        [(4, 0.0), (0, UNLIKELIEST), (1, UNLIKELIEST), (6, UNLIKELIEST)],
    )


@pytest.mark.parametrize("size", [0, 8, 24, 36])
def test_a_payload_of_another_size(size: int) -> None:
    with pytest.raises(MalformedPayload, match=f"{size} bytes beside a token, where 32"):
        Likelihoods(RowReads(2, (9, 8))).read(bytes(size))


def test_only_numbers_that_json_has() -> None:
    numbers = [0.0, -3.5, 1e-7, float("-inf"), float("inf"), float("nan"), -1e9]
    assert [finite(number) for number in numbers] == [0.0, -3.5, 1e-7, *[UNLIKELIEST] * 4]
