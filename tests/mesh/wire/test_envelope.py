import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import FrameRefused, MeshError, TooLarge
from mesh.wire.codec import BodyCodec, Codec, check_sizes, open_envelope
from mesh.wire.frames import SYSTEM_CODEC, Join, Ping, Publication
from mesh.wire.header import PROTOCOL_VERSION, Header, Limits, Verb, encode_header
from mesh.wire.message import HotMessage, Message

LIMITS = Limits(max_parts=4, max_header_bytes=200, max_body_bytes=1000, max_message_bytes=2000)


class Note(Message, frozen=True):
    text: str
    more: list[int] = []


class Row(HotMessage, frozen=True):
    step: int
    rows: list[tuple[int, float]] = []


CODEC = Codec(Note, Row)
GOOD = Header(PROTOCOL_VERSION, Verb.TELL, 7, (1 << 32) + 3, 0, "a", 2, 5)


def refused(parts, limits=LIMITS):
    try:
        open_envelope(parts)
        check_sizes(parts, limits)
    except FrameRefused as refusal:
        return refusal.code
    return None


def decoded_or_refused(codec, body):
    """Anything but a refusal goes through, and fails the test."""
    with contextlib.suppress(FrameRefused):
        codec.decode(body)


def test_headers_come_back():
    header = Header(
        PROTOCOL_VERSION, Verb.ASK, 1, 2, 3, "worker-0", 4, 5, 6, 1, 0, "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    )
    assert open_envelope((encode_header(header), b"")) == header


def test_fields_appended_later_are_ignored_and_missing_ones_have_defaults():
    full = list(msgspec.structs.astuple(GOOD))
    assert open_envelope((msgspec.msgpack.encode([*full, "new", {"x": 1}]), b"")) == GOOD
    assert open_envelope((msgspec.msgpack.encode(full[:8]), b"")) == GOOD


def test_what_is_no_envelope_is_refused():
    good = encode_header(GOOD)
    assert refused(()) == "bad_header"
    assert refused((good,)) == "bad_header"
    assert refused((b"", b"")) == "bad_header"
    assert refused((b"\xc1garbage", b"")) == "bad_header"
    assert refused((msgspec.msgpack.encode({"verb": 1}), b"")) == "bad_header"
    assert refused((good, b"", b"", b"", b"")) == "too_many_parts"
    assert refused((b"\x00" * 201, b"")) == "bad_header"
    assert refused((encode_header(msgspec.structs.replace(GOOD, trace="t" * 201)), b"")) == "too_large"
    assert refused((good, b"\x00" * 1001)) == "too_large"
    assert refused((good, b"\x00" * 900, memoryview(b"\x00" * 1200))) == "too_large"
    assert refused((encode_header(msgspec.structs.replace(GOOD, version=9)), b"")) == "wrong_version"


def test_a_hello_of_another_version_is_opened():
    hello = msgspec.structs.replace(GOOD, version=9, verb=int(Verb.HELLO))
    assert open_envelope((encode_header(hello), b"")).version == 9


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_garbage_raises_only_refusals(parts):
    assert refused(parts) is not None


@given(st.binary(max_size=200))
def test_bodies_of_garbage_raise_only_refusals(body):
    for codec in (CODEC, SYSTEM_CODEC, Codec(Note)):
        decoded_or_refused(codec, body)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(ANYTHING, st.sampled_from(sorted(t.__name__ for t in SYSTEM_CODEC.types)))
def test_well_formed_bodies_of_wrong_shape_raise_only_refusals(value, tag):
    for body in (value, {"type": tag, "member": value, "topic": value}, ["Row", value, value]):
        for codec in (CODEC, SYSTEM_CODEC):
            decoded_or_refused(codec, msgspec.msgpack.encode(body))


@given(
    st.text(),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.tuples(st.integers(0, 99), st.floats(allow_nan=False))),
)
def test_both_kinds_of_messages_come_back(text, more, rows):
    for message in (Note(text=text, more=more), Row(step=1, rows=rows)):
        assert CODEC.decode(CODEC.encode(message)) == message
        assert CODEC.decode(memoryview(CODEC.encode(message))) == message


def test_deep_nesting_is_refused_not_a_crash():
    deep = b"\x91" * 100_000
    with pytest.raises(FrameRefused):
        CODEC.decode(deep)
    with pytest.raises(FrameRefused):
        SYSTEM_CODEC.decode(b"\x82\xa4type\xa4Join\xa6member\x88" + b"\xaaattributes" + b"\x81\xa1a" * 50_000)


def test_a_protocol_without_hot_messages_refuses_arrays():
    with pytest.raises(FrameRefused):
        Codec(Note).decode(CODEC.encode(Row(step=1)))
    with pytest.raises(FrameRefused, match="bad_body"):
        Codec(Note).decode(b"")


def test_unknown_fields_are_ignored():
    body = msgspec.msgpack.encode({"type": "Note", "text": "x", "later": [1, 2]})
    assert CODEC.decode(body) == Note(text="x")


def test_bodies_tells_system_bodies_by_the_flag():
    bodies = BodyCodec(CODEC, SYSTEM_CODEC, LIMITS)
    for message, flag in ((Note(text="x"), 0), (Ping(), 1)):
        body, flags = bodies.encode(message)
        assert flags == flag
        assert bodies.decode(msgspec.structs.replace(GOOD, flags=flags), body) == message


def test_bodies_refuses_to_send_what_would_be_refused():
    bodies = BodyCodec(CODEC, SYSTEM_CODEC, LIMITS)
    with pytest.raises(TooLarge, match="a body may have at most 1000"):
        bodies.encode(Note(text="x" * 1000))
    with pytest.raises(TooLarge, match="at most 2"):
        bodies.encode(Note(text=""), [b""] * 3)
    with pytest.raises(TooLarge, match="at most 2000 in all"):
        bodies.encode(Note(text=""), [b"x" * 1500, memoryview(b"y" * 1500)])
    assert bodies.encode(Note(text=""), [b"x" * 1500])


def test_nested_payloads_are_kept_as_they_are():
    publication = Publication(topic="t", sequence=1, payload=msgspec.Raw(CODEC.encode(Row(step=4))))
    back = SYSTEM_CODEC.decode(SYSTEM_CODEC.encode(publication))
    assert CODEC.decode(bytes(back.payload)) == Row(step=4)


def test_errors_say_their_code():
    assert str(FrameRefused("no_hello")) == "no_hello: no hello"
    assert isinstance(TooLarge("x"), MeshError)
    assert Join.__name__ in {t.__name__ for t in SYSTEM_CODEC.types}
