"""Finds the first stop string in text that comes in pieces, and holds back what may become one.

The pattern is an Aho-Corasick automaton (Efficient string matching, CACM 1975): one pass over the text whatever the
number of stop strings, and its state is exactly the longest suffix that is a prefix of a stop string, which is the text
to hold back. The first match is the one that ends first; of several ending together, the longest. Results depend on
the text only, not on how it was cut. Used by `nodes/detokenizer/core.py`.
"""

from collections.abc import Iterable
from functools import lru_cache


class StopPattern:
    """Compiled stop strings, shared by all streams that have them. Memory: some hundred bytes per character."""

    __slots__ = ("children", "fallback", "firsts", "held", "matched")

    def __init__(self, stops: Iterable[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.matched = [0]
        """Length of the longest stop string that ends in a state."""
        self.held = [0]
        """Length of the suffix to hold back in a state."""
        self.fallback = [0]
        """State of the longest proper suffix."""
        for stop in stops:
            self._insert(stop)
        self.firsts = frozenset(self.children[0])
        self._link()

    def next_state(self, state: int, character: str) -> int:
        while state and character not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            known = self.children[state].get(character)
            if known is None:
                known = self.children[state][character] = len(self.children)
                self.children.append({})
                self.matched.append(0)
                self.held.append(depth)
                self.fallback.append(0)
            state = known
        self.matched[state] = len(stop)

    def _link(self) -> None:
        level = list(self.children[0].values())
        while level:
            deeper: list[int] = []
            for state in level:
                suffix = self.fallback[state]
                self.matched[state] = self.matched[state] or self.matched[suffix]
                if not self.children[state]:
                    self.held[state] = self.held[suffix]
                for character, child in self.children[state].items():
                    self.fallback[child] = self.next_state(suffix, character)
                    deeper.append(child)
            level = deeper


@lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopPattern:
    """The pattern of these stop strings; empty ones match nothing."""
    return StopPattern(stops)


class StopMatcher:
    """One stream's place in a pattern. Held text is shorter than the longest stop string."""

    __slots__ = ("_held", "_include_stop", "_pattern", "_state")

    def __init__(self, pattern: StopPattern, include_stop: bool = False) -> None:
        self._pattern = pattern
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str]:
        """What can be shown now, and the stop string if one is complete (feed no more); not `armed`: let it through."""
        pattern = self._pattern
        if not self._held and pattern.firsts.isdisjoint(text):
            self._state = 0
            return text, ""
        state, text, start = self._state, self._held + text, len(self._held)
        for index in range(start, len(text)):
            state = pattern.next_state(state, text[index])
            if armed and pattern.matched[state]:
                self._state, self._held = 0, ""
                end = index + 1
                begin = end - pattern.matched[state]
                return text[: end if self._include_stop else begin], text[begin:end]
        num_shown = len(text) - pattern.held[state]
        self._state, self._held = state, text[num_shown:]
        return text[:num_shown], ""

    def flush(self) -> str:
        text, self._held, self._state = self._held, "", 0
        return text
