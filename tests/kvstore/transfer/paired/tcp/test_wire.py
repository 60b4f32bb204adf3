"""What is said over the connections of a pair, and how transfers are dealt out over them."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import TransferError
from kvstore.transfer.paired.tcp.wire import (
    HEADER_BYTES,
    HELLO_BYTES,
    MAX_PIECES,
    MIN_CHUNK_BYTES,
    Rendezvous,
    answer_to,
    decode_hello,
    decode_rendezvous,
    encode_header,
    encode_hello,
    encode_rendezvous,
    is_proven,
    num_bytes_of,
    require_header,
    shares,
)

RENDEZVOUS = Rendezvous("127.0.0.1", 5, b"k" * 16, b"s" * 32, 4, MIN_CHUNK_BYTES)


@pytest.mark.parametrize("host", [RENDEZVOUS.host, "fd00::7", "d.example", "decode-1", "mesh_decode_1", "d.example."])
def test_an_offer_is_read_as_it_was_written(host: str) -> None:
    written = msgspec.structs.replace(RENDEZVOUS, host=host)
    assert decode_rendezvous(encode_rendezvous(written)) == written


@pytest.mark.parametrize(
    "change",
    [
        {"host": "a name"},
        {"host": "."},
        {"host": ""},
        {"host": "1" * 254},
        {"port": 0},
        {"port": 70000},
        {"key": b"short"},
        {"secret": b""},
        {"num_streams": 0},
        {"num_streams": 17},
        {"chunk_bytes": 1},
        {"chunk_bytes": 1 << 40},
    ],
)
def test_an_offer_that_asks_for_what_is_not_given_is_refused(change: dict) -> None:
    with pytest.raises(TransferError, match="invalid tcp offer") as caught:
        decode_rendezvous(encode_rendezvous(msgspec.structs.replace(RENDEZVOUS, **change)))
    assert caught.value.code == "bad_offer"


def test_an_offer_with_a_field_nested_without_end_is_refused() -> None:
    offer = bytearray(encode_rendezvous(RENDEZVOUS)) + b"\x91" * 100_000
    # One element more, which nobody knows and the decoder skips, level by level.
    offer[0] += 1
    with pytest.raises(TransferError, match="invalid tcp offer") as caught:
        decode_rendezvous(bytes(offer))
    assert caught.value.code == "bad_offer"


@given(st.binary(max_size=200))
def test_any_bytes_are_an_offer_or_a_typed_refusal(data: bytes) -> None:
    with contextlib.suppress(TransferError):
        assert 1 <= decode_rendezvous(data).num_streams <= 16


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_a_stranger_proves_nothing(data: bytes) -> None:
    hello = decode_hello(data)
    assert hello is None or not is_proven(hello, RENDEZVOUS.secret)


def test_a_proof_is_for_one_pair_one_connection_one_role() -> None:
    sound = encode_hello(RENDEZVOUS, 2)
    assert len(sound) == HELLO_BYTES
    hello = decode_hello(sound)
    assert hello is not None
    assert is_proven(hello, RENDEZVOUS.secret)
    assert not is_proven(hello, b"t" * 32)
    assert not is_proven(hello._replace(stream=3), RENDEZVOUS.secret)
    assert not is_proven(hello._replace(key=b"l" * 16), RENDEZVOUS.secret)
    assert not is_proven(hello._replace(proof=answer_to(RENDEZVOUS, 2)), RENDEZVOUS.secret)
    assert answer_to(RENDEZVOUS, 2) != answer_to(RENDEZVOUS, 3)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_is_the_expected_one_or_refused(data: bytes) -> None:
    require_header(encode_header(3, 100), 3, 100)
    for other in (data, encode_header(4, 100), encode_header(3, 101)):
        with pytest.raises(TransferError, match="was ordered") as caught:
            require_header(other, 3, 100)
        assert caught.value.code == "bad_stream"


PARTS = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.one_of(st.integers(1, 3000), st.integers(1, 300_000))), max_size=40
)


@given(PARTS, st.integers(1, 16), st.integers(MIN_CHUNK_BYTES, 1 << 19))
def test_every_byte_is_dealt_to_one_connection_in_bounded_chunks(
    parts: list[tuple[int, int]], num_streams: int, chunk_bytes: int
) -> None:
    dealt = shares(parts, num_streams, chunk_bytes)
    assert len(dealt) == num_streams
    assert sum(map(num_bytes_of, dealt)) == sum(size for _, size in parts)
    for chunks in dealt:
        for chunk in chunks:
            assert 0 < num_bytes_of([chunk]) <= chunk_bytes
            assert len(chunk) <= MAX_PIECES
    # Chunks go round: read in that order they are the transfer.
    rounds = max(map(len, dealt), default=0)
    flat = [piece for turn in range(rounds) for chunks in dealt if turn < len(chunks) for piece in chunks[turn]]
    joined: list[tuple[int, int]] = []
    wanted = iter(parts)
    rest = next(wanted, None)
    for offset, size in flat:
        assert rest is not None
        assert (offset, size <= rest[1]) == (rest[0], True)
        rest = (rest[0] + size, rest[1] - size) if size < rest[1] else next(wanted, None)
        joined.append((offset, size))
    assert rest is None


def test_many_small_pieces_make_chunks_of_their_own() -> None:
    [chunks] = shares([(10 * number, 1) for number in range(MAX_PIECES + 1)], 1, 1 << 20)
    assert [len(chunk) for chunk in chunks] == [MAX_PIECES, 1]


def test_a_small_transfer_keeps_all_connections_busy() -> None:
    dealt = shares([(0, 4 * MIN_CHUNK_BYTES)], 4, 1 << 24)
    assert [num_bytes_of(chunks) for chunks in dealt] == [MIN_CHUNK_BYTES] * 4
