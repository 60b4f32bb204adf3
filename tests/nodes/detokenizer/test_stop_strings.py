"""Stop strings against a search over the whole text."""

from hypothesis import example, given
from hypothesis import strategies as st

from nodes.detokenizer.stop_strings import StopMatcher, compile_stops

STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text("ab.c", max_size=6), max_size=12)


def first_match(text: str, stops: list[str], floor: int = 0) -> tuple[int, int] | None:
    """Start and end of the match that ends first, after `floor`; of several, the longest."""
    for end in range(floor + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def fed(matcher, pieces, num_unarmed=0):
    shown = ""
    for i, piece in enumerate(pieces):
        new, found = matcher.feed(piece, armed=i >= num_unarmed)
        shown += new
        if found:
            return shown, True
    return shown + matcher.flush(), False


# The first to end wins, and of those the longest; one over three tokens; one that is let through while it is not armed.
@example(["abcd", "bc"], ["abcd"], False, 0)
@example(["bc", "abc"], ["xabc"], False, 0)
@example(["</answer>"], ["42</", "ans", "wer>!"], False, 0)
@example(["\n"], ["a\n", "b\nc"], False, 1)
@given(STOPS, PIECES, st.booleans(), st.integers(0, 4))
def test_same_as_search_in_the_whole_text(stops, pieces, include, num_unarmed):
    text = "".join(pieces)
    match = first_match(text, stops, len("".join(pieces[:num_unarmed])))
    shown, found = fed(StopMatcher(compile_stops(tuple(stops)), include), pieces, num_unarmed)
    assert found == (match is not None)
    assert shown == (text if match is None else text[: match[1] if include else match[0]])


@example(["</answer>"], ["42</", "ans", "wer>!"])
@given(STOPS, PIECES)
def test_holds_back_exactly_what_may_become_a_stop_string(stops, pieces):
    matcher = StopMatcher(compile_stops(tuple(stops)))
    text = shown = ""
    for piece in pieces:
        text += piece
        new, found = matcher.feed(piece)
        shown += new
        if found:
            return
        longest = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert text[len(shown) :] == text[len(text) - longest :]


def test_no_stop_strings_or_empty_ones_match_nothing():
    assert fed(StopMatcher(compile_stops(())), ["abc"]) == ("abc", False)
    assert fed(StopMatcher(compile_stops(("",))), ["abc"]) == ("abc", False)


def test_held_text_is_bounded_over_a_long_text():
    matcher = StopMatcher(compile_stops(("a" * 50,)))
    num_held = 0
    for _ in range(2000):
        num_held += 50 - len(matcher.feed("a" * 49 + "b")[0])
        assert num_held < 50
