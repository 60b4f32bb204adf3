import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.checksum import page_checksum
from kvstore.store.heads import Head, are_sound, decode_heads, encode_heads, hash_key, hash_words
from kvstore.store.place import HEAD_BYTES

HASHES = st.binary(min_size=16, max_size=16)
NUMBERS = st.integers(1, 2**64 - 1)
HEADS = st.lists(st.builds(Head, HASHES, HASHES, NUMBERS, NUMBERS), min_size=1, max_size=4)


@given(HEADS, st.integers(0, 2**32))
def test_heads_come_back(heads: list[Head], first: int) -> None:
    data = encode_heads(first, heads)
    assert len(data) == len(heads) * HEAD_BYTES == len(heads) * 64
    rows = decode_heads(data + b"torn")
    assert are_sound(rows, first).all()
    for row, head in zip(rows, heads, strict=True):
        assert row[:6].tobytes() == b"".join(head[:2]) + head.sequence.to_bytes(8, "little") + head.checksum.to_bytes(
            8, "little"
        )


@given(HEADS, st.integers(0, 2**20), st.data())
def test_a_head_that_is_torn_flipped_or_elsewhere_does_not_count(
    heads: list[Head], first: int, data: st.DataObject
) -> None:
    whole = bytearray(encode_heads(first, heads))
    assert not are_sound(decode_heads(whole), first + data.draw(st.integers(1, 100))).any(), "it is another slot's"
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    sound = [True] * len(heads)
    sound[at // HEAD_BYTES] = False
    assert are_sound(decode_heads(whole), first).tolist() == sound


def test_a_slot_of_zeros_holds_nothing() -> None:
    assert not are_sound(decode_heads(bytes(640)), 0).any()
    # Nor does a head that is whole but says that it is of no page.
    assert not are_sound(decode_heads(encode_heads(3, [Head(bytes(16), bytes(16), 0, 0)])), 3).any()


@given(HASHES)
def test_a_hash_is_the_same_words_one_by_one(page_hash: bytes) -> None:
    assert hash_words([page_hash]).tolist() == [list(hash_key(page_hash))]


@given(st.binary(min_size=1, max_size=300), st.data())
def test_flipped_bits_and_zeros_change_a_pages_checksum(page: bytes, data: st.DataObject) -> None:
    before = page_checksum([memoryview(page)])
    assert 0 <= before < 2**64
    changed = bytearray(page)
    for at in data.draw(st.sets(st.integers(0, 8 * len(page) - 1), min_size=1, max_size=2)):
        changed[at // 8] ^= 1 << at % 8
    assert page_checksum([memoryview(changed)]) != before
    assert page_checksum([memoryview(bytes(len(page)))]) != 0


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_a_line_that_is_stuck_in_two_words_is_seen_by_both_halves(bit: int) -> None:
    words = np.arange(1000, dtype=np.uint64)
    before = page_checksum([memoryview(words).cast("B")])
    words[[10, 700]] ^= np.uint64(1) << np.uint64(bit)
    after = page_checksum([memoryview(words).cast("B")])
    assert before >> 32 != after >> 32


def test_a_page_of_several_ranks_has_the_checksum_of_all_their_bytes() -> None:
    parts = [memoryview(bytes(range(64))), memoryview(bytes(range(64, 128)))]
    assert page_checksum(parts) == page_checksum([memoryview(bytes(range(128)))])
    assert page_checksum(parts) != page_checksum(parts[::-1])
    # Words of 2**63 and more: their sum has more than 64 bits.
    high = memoryview(b"\xff" * 64)
    assert page_checksum([high, high]) == page_checksum([memoryview(b"\xff" * 128)])
