"""Stop strings against a search over the whole text."""

from hypothesis import given
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


@given(STOPS, PIECES, st.booleans(), st.integers(0, 4))
def test_same_as_search_in_the_whole_text(stops, pieces, include, num_unarmed):
    text = "".join(pieces)
    match = first_match(text, stops, len("".join(pieces[:num_unarmed])))
    shown, found = fed(StopMatcher(compile_stops(tuple(stops)), include), pieces, num_unarmed)
    assert found == (match is not None)
    assert shown == (text if match is None else text[: match[1] if include else match[0]])


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


def test_first_to_end_wins_and_longest_of_those():
    assert fed(StopMatcher(compile_stops(("abcd", "bc"))), ["abcd"]) == ("a", True)
    assert fed(StopMatcher(compile_stops(("bc", "abc"))), ["xabc"]) == ("x", True)


def test_stop_string_over_three_tokens():
    matcher = StopMatcher(compile_stops(("</answer>",)))
    assert matcher.feed("42</") == ("42", False)
    assert matcher.feed("ans") == ("", False)
    assert matcher.feed("wer>!") == ("", True)


def test_unarmed_match_is_let_through_and_not_held():
    matcher = StopMatcher(compile_stops(("\n",)))
    assert matcher.feed("a\n", armed=False) == ("a\n", False)
    assert matcher.feed("b\nc") == ("b", True)


def test_no_stop_strings_or_empty_ones_match_nothing():
    assert fed(StopMatcher(compile_stops(())), ["abc"]) == ("abc", False)
    assert fed(StopMatcher(compile_stops(("",))), ["abc"]) == ("abc", False)


def test_held_text_is_bounded_over_a_long_text():
    matcher = StopMatcher(compile_stops(("a" * 50,)))
    for _ in range(2000):
        matcher.feed("a" * 49 + "b")
        assert len(matcher._held) < 50
