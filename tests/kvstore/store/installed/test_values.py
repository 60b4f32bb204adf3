"""What is kept for a page, and what is taken for one."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.checksum import page_checksum
from kvstore.store.installed import values as values_module
from kvstore.store.installed.identity import HEADER_BYTES, context_of, digest_of
from kvstore.store.installed.values import PageValues, UnsignedValue
from tests.kvstore.store.installed.unruly import IDENTITY, OTHER, PAGE, VALUES, page_of, value_of

HASH, ANOTHER = b"h" * 16, b"a" * 16
VALUE = value_of(HASH, page_of(HASH))
NAMED = 48
"""Bytes before the page that are looked at; the rest of its 64 say nothing."""


def test_a_page_is_taken_out_as_it_was() -> None:
    assert len(VALUE) == VALUES.value_bytes == HEADER_BYTES + PAGE
    parts = VALUES.open(HASH, VALUE)
    assert parts is not None
    assert [len(part) for part in parts] == [PAGE // 2, PAGE // 2]
    assert b"".join(parts) == page_of(HASH) == VALUE[HEADER_BYTES:]


def test_what_is_put_cannot_be_written() -> None:
    page = bytearray(PAGE)
    value = VALUES.seal(HASH, [memoryview(page)[: PAGE // 2], memoryview(page)[PAGE // 2 :]])
    assert value.readonly
    page[:] = page_of(ANOTHER)
    assert bytes(value[HEADER_BYTES:]) == bytes(PAGE), "it is a copy"


@given(st.integers(0, len(VALUE) * 8 - 1))
def test_each_bit_counts(bit: int) -> None:
    changed = bytearray(VALUE)
    changed[bit // 8] ^= 1 << bit % 8
    parts = VALUES.open(HASH, changed)
    if parts is not None:
        assert NAMED <= bit // 8 < HEADER_BYTES
        assert b"".join(parts) == page_of(HASH)


@given(st.integers(0, len(VALUE)), st.booleans())
def test_pieces_of_two_values_are_neither(at: int, is_first: bool) -> None:
    other = value_of(ANOTHER, page_of(ANOTHER))
    one, two = (VALUE, other) if is_first else (other, VALUE)
    for page_hash in (HASH, ANOTHER):
        parts = VALUES.open(page_hash, one[:at] + two[at:])
        assert parts is None or b"".join(parts) == page_of(page_hash)


@pytest.mark.parametrize("value", [b"", bytes(len(VALUE)), VALUE[:-1], VALUE + b"x", VALUE[: len(VALUE) // 2]])
def test_what_is_no_value_is_none(value: bytes) -> None:
    assert VALUES.open(HASH, value) is None
    # A short one in a buffer of ours.
    assert VALUES.open(HASH, value[: len(VALUE) - 1].ljust(len(VALUE), b"\0")) is None


def test_another_identity_s_is_none() -> None:
    assert VALUES.open(HASH, value_of(HASH, page_of(HASH), OTHER)) is None
    assert PageValues(OTHER).open(HASH, VALUE) is None
    assert digest_of(IDENTITY) != digest_of(OTHER)


def test_a_buffer_that_changes_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = bytearray(VALUE)

    def then_changed(parts: list[memoryview]) -> int:
        checksum = page_checksum(parts)
        buffer[-1] ^= 1
        return checksum

    monkeypatch.setattr(values_module, "page_checksum", then_changed)
    parts = VALUES.open(HASH, buffer)
    assert parts is not None
    assert b"".join(parts) == page_of(HASH)
    assert bytes(buffer) != VALUE


def test_memory_that_is_gone_is_said() -> None:
    view = memoryview(bytearray(PAGE // 2))
    view.release()
    with pytest.raises(ValueError, match="released"):
        VALUES.seal(HASH, [view, memoryview(bytearray(PAGE // 2))])


def test_what_a_store_is_told() -> None:
    context = context_of(IDENTITY, 2.0, {"path": "/x"})
    assert (context.page_bytes, context.num_ranks, context.value_bytes) == (PAGE // 2, 2, len(VALUE))
    assert (context.layout_digest, context.numerics) == (IDENTITY.layout_digest, IDENTITY.numerics)
    assert (context.deadline_s, context.options) == (2.0, {"path": "/x"})
    assert context.namespace != context_of(OTHER, 2.0, {}).namespace


KEY, ANOTHER_KEY = b"k" * 32, b"K" * 32


def signed(key: bytes, page_hash: bytes = HASH, of: bytes = HASH) -> bytes:
    data = memoryview(page_of(of))
    return bytes(PageValues(IDENTITY, key).seal(page_hash, [data[: PAGE // 2], data[PAGE // 2 :]]))


def test_what_was_sealed_with_the_key_is_taken_out_as_it_was() -> None:
    parts = PageValues(IDENTITY, KEY).open(HASH, signed(KEY))
    assert parts is not None
    assert b"".join(parts) == page_of(HASH)
    # Where no key is set, nobody asks for a signature.
    assert PageValues(IDENTITY).open(HASH, signed(KEY)) is not None


@pytest.mark.parametrize("value", [VALUE, signed(ANOTHER_KEY), signed(KEY, of=ANOTHER)[:64] + VALUE[64:]])
def test_what_was_sealed_without_the_key_is_told_from_what_is_broken(value: bytes) -> None:
    values = PageValues(IDENTITY, KEY)
    if value[40:48] == VALUE[40:48]:
        with pytest.raises(UnsignedValue):
            values.open(HASH, value)
    else:
        assert values.open(HASH, value) is None


@given(st.integers(0, len(VALUE) * 8 - 1))
def test_each_bit_of_a_signed_value_counts(bit: int) -> None:
    changed = bytearray(signed(KEY))
    changed[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(UnsignedValue):
        assert PageValues(IDENTITY, KEY).open(HASH, changed) is None


@pytest.mark.parametrize("data", [page_of(HASH), page_of(ANOTHER)])
def test_what_is_forged_has_a_right_checksum_and_no_signature(data: bytes) -> None:
    """Whoever can write to the store knows how a value is made, and may copy signatures: all but the key."""
    for copied in (bytes(16), signed(KEY, ANOTHER, of=ANOTHER)[48:64], signed(ANOTHER_KEY)[48:64]):
        forged = bytearray(value_of(HASH, data))
        forged[48:64] = copied
        assert PageValues(IDENTITY).open(HASH, forged) is not None
        with pytest.raises(UnsignedValue):
            PageValues(IDENTITY, KEY).open(HASH, forged)


def test_namespaces_are_of_those_who_have_the_key() -> None:
    names = {context_of(IDENTITY, 2.0, {}, key).namespace for key in (b"", KEY, ANOTHER_KEY)}
    assert len(names) == 3
    assert context_of(IDENTITY, 2.0, {}, KEY).namespace in names
    assert [context_of(IDENTITY, 2.0, {}, key).is_signed for key in (b"", KEY)] == [False, True]
