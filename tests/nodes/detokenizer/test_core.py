"""The detokenizer's core by event lists: what comes in, what goes out."""

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from mesh.address import Address
from mesh.runtime.effects import Tell, Told
from mesh.runtime.trace_ring import key_of
from mesh.transport.base import Channel
from nodes.bundled.byte_tokenizer import SPECIAL_TOKEN_IDS, byte_tokenizer_json
from nodes.detokenizer.config import DetokenizerLimits
from nodes.detokenizer.core import DetokenizerCore, LeaseTick, MalformedBatch, SchedulerLost, SendToScheduler
from nodes.detokenizer.incremental import DecoderFactory
from nodes.protocol import Resend, ResendFrom, StopAt, StreamFinish, StreamOpen, TextBatch, TextDelta, TokenBatch
from nodes.request import AttemptRef, Stages, StopRules
from nodes.trace_notes import MIN_HELD, Noted
from tests.nodes.noted import NoteList

DECODERS = DecoderFactory(Tokenizer.from_str(byte_tokenizer_json()))
EOS = SPECIAL_TOKEN_IDS["<|im_end|>"]
D = Address("decode-0", 3)


def core(**limits):
    return DetokenizerCore(DECODERS, DetokenizerLimits(**limits))


def opening(stream=1, *, request_id="r", attempt=0, output="", **rules):
    stop = StopRules(max_tokens=100, **rules)
    return StreamOpen(stream, request_id, attempt, "gw", stop, [], list(output.encode()), 7)


def batch(text="", *, stream=1, position=0, opens=(), finish=None, closes=()):
    ids = text if isinstance(text, list) else list(text.encode())
    finishes = [StreamFinish(stream, position + len(ids), finish)] if finish else []
    columns = ([stream], [position], [len(ids)]) if ids else ([], [], [])
    return TokenBatch(
        streams=columns[0], positions=columns[1], counts=columns[2], token_ids=ids,
        opens=list(opens), finishes=finishes, closes=list(closes),
    )  # fmt: skip


def delta(text, ids=None, *, position=0, offset=0, finish=None, request_id="r", attempt=0, stop="", past=0):
    ids = list(text.encode()) if ids is None else ids
    own = {"stop_string": stop, "num_past": past}
    return TextDelta(request_id, attempt, position, ids, offset, text, finish, 7, "decode-0", **own)


def feed(detokenizer, step, now=0):
    """What it wants when this comes from `D`."""
    return detokenizer.handle(Told(D, step), now)


def texts(commands):
    return [d for c in commands if isinstance(c, Tell) for d in c.message.deltas]


def asked(commands):
    return [c.message for c in commands if isinstance(c, SendToScheduler)]


@pytest.fixture
def detokenizer():
    return core()


def test_tokens_become_text_at_their_offsets(detokenizer):
    assert feed(detokenizer, batch("h", opens=[opening()])) == [
        Tell("gw", TextBatch(deltas=[delta("h")]), Channel.DATA)
    ]
    assert texts(feed(detokenizer, batch("i", position=1))) == [delta("i", position=1, offset=1)]
    assert texts(feed(detokenizer, batch("ab", position=2))) == [delta("ab", position=2, offset=2)]
    assert texts(feed(detokenizer, batch("c", position=4))) == [delta("c", position=4, offset=4)]


def test_stages_are_in_the_first_delta_after_an_open_and_in_no_other():
    detokenizer, stages = core(), Stages(1.0, 2.0, 3.0, 4.0)
    began = replace(opening(), stages=stages)
    for _ in range(2):
        (first,) = texts(feed(detokenizer, batch("h", opens=[began])))
        assert first.stages == stages
        for position in (1, 2):
            (later,) = texts(feed(detokenizer, batch("i", position=position)))
            assert later.stages is None


def test_what_goes_beside_a_token_stays_beside_it_whatever_comes_again(detokenizer):

    def beside(text, *extras, **where):
        taken = replace(batch(text, **where), extras=list(extras))
        return [(one.position, one.token_ids, one.extras) for one in texts(feed(detokenizer, taken))]

    assert beside("h", b"1", opens=[opening()]) == [(0, [104], [b"1"])]
    assert beside("i", b"", position=1) == [(1, [105], [b""])]
    assert beside("iab", b"", b"3", b"", position=1) == [(2, [97, 98], [b"3", b""])]
    assert beside("c", position=4) == [(4, [99], [])]
    again = opening(2, request_id="q", attempt=1, output="say ", stop=["ow!"])
    assert beside("no", b"4", b"5", stream=2, position=4, opens=[again]) == [(4, [110, 111], [b"4", b"5"])]
    assert beside("now", b"", b"", b"6", stream=2, position=4) == [(6, [119], [b"6"])]
    assert beside("!?", b"7", b"8", stream=2, position=7) == [(7, [33], [b"7"])], "what follows the stop is not said"
    with pytest.raises(MalformedBatch, match="1 extras for 2 token ids"):
        beside("de", b"x", position=5)


def test_one_batch_per_gateway(detokenizer):
    opens = [StreamOpen(i, f"r{i}", 0, f"gw{i % 2}", StopRules(9), [], []) for i in range(6)]
    step = TokenBatch(streams=[*range(6)], positions=[0] * 6, counts=[1] * 6, token_ids=[65] * 6, opens=opens)
    commands = feed(detokenizer, step)
    assert [(c.actor_id, [d.request_id for d in c.message.deltas]) for c in commands] == [
        ("gw0", ["r0", "r2", "r4"]),
        ("gw1", ["r1", "r3", "r5"]),
    ]


def test_tokens_of_half_a_character_are_sent_without_text(detokenizer):
    first, second = "é".encode()
    assert texts(feed(detokenizer, batch([first], opens=[opening()]))) == [delta("", [first])]
    assert texts(feed(detokenizer, batch([second], position=1))) == [delta("é", [second], position=1)]


def test_finish_by_stop_token_hides_its_text(detokenizer):
    step = batch([104, 105, 33], opens=[opening()], finish="stop")
    assert texts(feed(detokenizer, step)) == [delta("hi", [104, 105, 33], finish="stop")]


def test_finish_by_length_shows_everything_and_flushes(detokenizer):
    step = batch([104, 0xC3], opens=[opening()], finish="length")
    assert texts(feed(detokenizer, step)) == [delta("h\ufffd", [104, 0xC3], finish="length")]


def test_finish_alone_after_its_tokens(detokenizer):
    feed(detokenizer, batch("hi", opens=[opening()]))
    assert texts(feed(detokenizer, batch(position=2, finish="length"))) == [
        delta("", position=2, offset=2, finish="length")
    ]


def test_repeated_finish_is_answered_again_and_repeated_tokens_are_not(detokenizer):
    last = feed(detokenizer, batch([104, EOS], opens=[opening()], finish="stop"))
    assert feed(detokenizer, batch([104, EOS], finish="stop"), 1) == last
    assert feed(detokenizer, batch([104, EOS]), 2) == []


def test_what_it_has_had_is_dropped(detokenizer):
    feed(detokenizer, batch("abc", opens=[opening()]))
    assert feed(detokenizer, batch("bc", position=1)) == []
    assert texts(feed(detokenizer, batch("bcd", position=1))) == [delta("d", position=3, offset=3)]


def test_gap_is_asked_for_and_not_at_every_step():
    detokenizer = core(resend_interval_s=0.1)
    feed(detokenizer, batch("a", opens=[opening()]))
    gap = SendToScheduler(D, Resend(streams=[ResendFrom("r", 0, 1)]))
    assert feed(detokenizer, batch("c", position=2), 1.0) == [gap]
    assert feed(detokenizer, batch("d", position=3), 1.05) == []
    assert feed(detokenizer, batch("e", position=4, finish="length"), 1.11) == [gap]
    assert texts(feed(detokenizer, batch("bcde", position=1, finish="length"), 1.12)) == [
        delta("bcde", position=1, offset=1, finish="length")
    ]
    assert detokenizer.num_resends == 2


def test_unknown_stream_is_asked_for_by_number():
    detokenizer = core(resend_interval_s=0.1)
    ask = [SendToScheduler(D, Resend(streams=[], streams_unknown=[1]))]
    assert feed(detokenizer, batch("c", position=2), 1.0) == ask
    assert feed(detokenizer, batch(position=3, finish="stop"), 1.05) == []
    assert feed(detokenizer, batch(position=3, finish="stop"), 1.2) == ask
    reopened = batch("c", position=2, opens=[opening(output="ab")], finish="length")
    assert texts(feed(detokenizer, reopened, 1.3)) == [delta("c", position=2, offset=2, finish="length")]


def test_memory_of_unknown_streams_is_bounded(detokenizer):
    step = TokenBatch(streams=[*range(5000)], positions=[0] * 5000, counts=[1] * 5000, token_ids=[65] * 5000)
    (ask,) = asked(feed(detokenizer, step))
    assert len(ask.streams_unknown) == 5000
    assert len(detokenizer.senders[D].asked_at) < 5000


def test_later_attempt_goes_on_where_the_first_was(detokenizer):
    opens = [StreamOpen(1, "r", 1, "gw", StopRules(100), [], [97, 98, 0xC3], 7)]
    step = TokenBatch(streams=[1], positions=[3], counts=[2], token_ids=[0xA9, 33], opens=opens)
    assert texts(feed(detokenizer, step)) == [delta("é!", [0xA9, 33], position=3, offset=2, attempt=1)]


def test_reopened_stream_may_begin_before_the_end_of_what_was_delivered(detokenizer):
    feed(detokenizer, batch("abcd", opens=[opening()]))
    step = batch("cd", position=2, opens=[opening(output="abcd")])
    assert texts(feed(detokenizer, step)) == [delta("cd", position=2, offset=2)]


def test_reopened_stream_with_a_gap_after_what_was_delivered(detokenizer):
    step = batch("d", position=3, opens=[opening(output="ab")])
    assert asked(feed(detokenizer, step)) == [Resend(streams=[ResendFrom("r", 0, 2)])]


def test_stop_string_ends_the_stream_and_tells_the_scheduler():
    detokenizer = core(resend_interval_s=0.1)
    commands = feed(detokenizer, batch("ab ST", opens=[opening(stop=["STOP"])]))
    assert texts(commands) == [delta("ab ", list(b"ab ST"), past=2)]
    commands = feed(detokenizer, batch("OPxyz", position=5))
    stop = StopAt(attempts=[AttemptRef("r", 0)])
    last = delta("", list(b"OP"), position=5, offset=3, finish="stop", stop="STOP", past=4)
    assert texts(commands) == [last]
    assert asked(commands) == [stop]
    assert feed(detokenizer, batch("y", position=8), 0.05) == []
    assert feed(detokenizer, batch("z", position=9), 0.2) == [SendToScheduler(D, stop)]
    assert feed(detokenizer, batch("OP", position=5), 0.4) == []
    assert texts(feed(detokenizer, batch(position=10, finish="length"), 0.5)) == [last]


def test_stop_string_is_told_at_once_even_after_a_gap_was_asked_for(detokenizer):
    feed(detokenizer, batch("a", opens=[opening(stop=["bc"])]))
    assert asked(feed(detokenizer, batch("c", position=2))) == [Resend(streams=[ResendFrom("r", 0, 1)])]
    commands = feed(detokenizer, batch("bc", position=1))
    assert asked(commands) == [StopAt(attempts=[AttemptRef("r", 0)])]


def test_stop_string_in_the_batch_that_ends_by_length(detokenizer):
    commands = feed(detokenizer, batch("abcd", opens=[opening(stop=["bc"])], finish="length"))
    assert texts(commands) == [delta("a", list(b"abc"), finish="stop", stop="bc", past=2)]
    assert asked(commands) == []


def test_held_back_text_is_shown_at_the_end(detokenizer):
    commands = feed(detokenizer, batch("abc", opens=[opening(stop=["bcd"])], finish="length"))
    assert texts(commands) == [delta("abc", finish="length")]


def test_stop_string_completed_by_the_flush(detokenizer):
    step = batch([97, 0xC3], opens=[opening(stop=["\ufffd"])], finish="length")
    assert texts(feed(detokenizer, step)) == [delta("a", [97, 0xC3], finish="stop", stop="\ufffd", past=1)]


def test_stop_string_within_min_tokens_does_not_count(detokenizer):
    commands = feed(detokenizer, batch("a.b.c", opens=[opening(stop=["."], min_tokens=2)]))
    assert texts(commands) == [delta("a.b", list(b"a.b."), finish="stop", stop=".", past=1)]


def test_stop_string_within_what_was_delivered_before(detokenizer):
    commands = feed(detokenizer, batch("d", position=3, opens=[opening(output="a.b", stop=["."])]))
    assert texts(commands) == [delta("", [], position=2, offset=1, finish="stop", stop=".", past=1)]


def test_include_stop_shows_it(detokenizer):
    commands = feed(detokenizer, batch("a.b", opens=[opening(stop=["."], include_stop=True)]))
    assert texts(commands) == [delta("a.", finish="stop", stop=".")]


def test_closed_stream_is_forgotten(detokenizer):
    feed(detokenizer, batch("a", opens=[opening()]))
    assert feed(detokenizer, batch(closes=[1, 2])) == []
    assert detokenizer.num_streams == 0


def test_lost_scheduler_takes_its_streams_along(detokenizer):
    feed(detokenizer, batch("a", opens=[opening()]))
    other = Address("decode-1", 1)
    detokenizer.handle(Told(other, batch("a", opens=[opening()])), 0)
    assert detokenizer.handle(SchedulerLost(D), 0) == []
    assert detokenizer.handle(SchedulerLost(D), 0) == []
    assert detokenizer.num_streams == 1


def test_newer_incarnation_replaces_the_older_for_good(detokenizer):
    feed(detokenizer, batch("a", opens=[opening()]))
    newer = Address("decode-0", 4)
    assert asked(detokenizer.handle(Told(newer, batch("b", position=1)), 0))
    assert detokenizer.num_streams == 0
    assert feed(detokenizer, batch("a", opens=[opening()])) == []
    assert detokenizer.num_streams == 0


def test_idle_streams_are_dropped_when_there_are_too_many():
    detokenizer = core(max_streams=20)
    for i in range(20):
        feed(detokenizer, batch("a", stream=i, opens=[opening(i)]), i)
    feed(detokenizer, batch("b", stream=0, position=1), 21)
    feed(detokenizer, batch("a", stream=20, opens=[opening(20)]), 22)
    assert (detokenizer.num_streams, detokenizer.num_dropped) == (20, 1)
    assert texts(feed(detokenizer, batch("c", stream=0, position=2), 23))
    assert asked(feed(detokenizer, batch("b", stream=1, position=1), 24))[0].streams_unknown == [1]


def test_ended_streams_are_forgotten_after_others():
    detokenizer = core(max_ended_streams=2)
    for i in range(4):
        feed(detokenizer, batch("a", stream=i, opens=[opening(i)], finish="length"))
    assert detokenizer.num_streams == 2
    feed(detokenizer, batch("a", stream=2, opens=[opening(2)]))
    for i in range(10, 12):
        feed(detokenizer, batch("a", stream=i, opens=[opening(i)], finish="length"))
    assert set(detokenizer.senders[D].streams) == {2, 10, 11}


@pytest.mark.parametrize(
    "columns",
    [
        ([1], [0], [1, 1], [1, 2]),
        ([1], [0, 1], [1], [1]),
        ([1], [0], [2], [1]),
        ([1, 2], [0, 0], [-1, 2], [1]),
        ([1], [-1], [1], [1]),
    ],
)
def test_malformed_batch_is_refused_whole(columns):
    names = ("streams", "positions", "counts", "token_ids")
    step = TokenBatch(**dict(zip(names, columns, strict=True)), opens=[opening()])
    detokenizer = core()
    with pytest.raises(MalformedBatch):
        feed(detokenizer, step)
    assert detokenizer.num_streams == 0


def test_streams_that_nothing_comes_for_are_forgotten_after_their_lease():
    detokenizer = core(lease_s=8.0)
    feed(detokenizer, batch("a", opens=[opening()]))
    feed(detokenizer, batch("a", stream=2, opens=[opening(2)], finish="length"), 1)
    feed(detokenizer, batch("b", position=1), 5)
    assert detokenizer.handle(LeaseTick(), 8.5) == []
    assert detokenizer.num_streams == 2
    detokenizer.handle(LeaseTick(), 9)
    assert set(detokenizer.senders[D].streams) == {1}
    assert not detokenizer._ended
    detokenizer.handle(LeaseTick(), 13)
    assert detokenizer.num_streams == 0
    assert asked(feed(detokenizer, batch("c", position=2), 14)) == [Resend(streams=[], streams_unknown=[1])]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_notes_of_first_text_of_what_is_held_back_and_of_the_end(detokenizer, one_by_one):
    detokenizer.note = notes = NoteList()
    said = "a" + "STO" + "n" + "STOM" + "z"
    feed(detokenizer, batch([EOS], opens=[opening(stop=("STOP",), attempt=2)]))
    assert notes.take() == [(Noted.OPENED, "r", 2, 0)]
    if one_by_one:
        for position, character in enumerate(said, 1):
            feed(detokenizer, batch(character, position=position))
        # Three tokens without text are passed over: it is what each character of Chinese brings.
        assert MIN_HELD == 4
        assert notes.take() == [(Noted.FIRST_TEXT, "r", 1, 1)]
        for position, character in enumerate("STOP", 11):
            feed(detokenizer, batch(character, position=position))
        num = 15
    else:
        feed(detokenizer, batch(said, position=1))
        assert notes.take() == [(Noted.FIRST_TEXT, "r", 1, 1)]
        feed(detokenizer, batch("!", position=11, finish="length"))
        num = 12
    assert notes.take() == [(Noted.SAID, "r", num, key_of("stop" if one_by_one else "length"))]
    # Its end is told again, and noted once.
    feed(detokenizer, batch(position=num, finish="length"))
    assert notes.take() == []


def test_text_that_was_held_back_for_long_is_noted_and_so_is_a_gap(detokenizer):
    detokenizer.note = notes = NoteList()
    feed(detokenizer, batch("a", opens=[opening(stop=("ENDING",))]))
    for position, character in enumerate("ENDIAB", 1):
        feed(detokenizer, batch(character, position=position))
    assert notes.take()[2:] == [(Noted.HELD, "r", 5, 4)]
    feed(detokenizer, batch("late", position=20))
    feed(detokenizer, batch("late", position=20))
    assert notes.take() == [(Noted.GAP, "r", 7, 0)], "once, as it is asked for"


def test_a_stream_that_is_opened_again_notes_its_first_text_again(detokenizer):
    feed(detokenizer, batch("abc", opens=[opening()]))
    detokenizer.note = notes = NoteList()
    feed(detokenizer, batch("d", position=3, opens=[opening(2, output="abc", attempt=1)], stream=2))
    feed(detokenizer, batch("e", position=4, stream=2))
    assert notes.take() == [(Noted.OPENED, "r", 1, 3), (Noted.FIRST_TEXT, "r", 3, 0)]
