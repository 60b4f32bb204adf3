"""What clients of a simulated mesh ask of their draws, and the only answer that they may get: a pure oracle.

It knows nothing of editors, tables and steps: an answer is drawn here as `echo` says that it draws, from the prompt and
the request alone, and what is read beside each token is packed as the protocol says.
"""

import random
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nodes.asks import ASK_NAMES

END = 257
"""The end token of `echo`; below 256 a token is a byte."""
VOCABULARY = 259
CHOICES = (("alpha", "alphabet", "beta"), ("12", "125", "7"), ("mu",), ("kappa or lambda", "kappa and lambda", "iota"))
"""Few: a grammar is compiled once for the process, in real time."""
LOOKED_FOR = ["bad_words/1", "logprobs/1", "allowed_token_ids/1", "penalties/1", "grammar/2"]


@dataclass(frozen=True)
class Asks:
    """`top` None: no logprobs. `allowed`: characters, and `ends`: whether the end is allowed with them."""

    top: int | None = None
    named: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed: str = ""
    ends: bool = False
    choices: tuple[str, ...] = ()
    presence: float = 0.0
    frequency: float = 0.0

    def fields(self) -> dict[str, Any]:
        """As fields of an HTTP body."""
        found = {
            "logprobs": self.top,
            "logprob_token_ids": list(self.named) or None,
            "bad_words": list(self.bad_words) or None,
            "allowed_token_ids": [*self.allowed.encode(), *[END] * self.ends] if self.allowed else None,
            "guided_choice": list(self.choices) or None,
            "presence_penalty": self.presence or None,
            "frequency_penalty": self.frequency or None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def allows(self, token: int, output: list[int]) -> bool:
        """Whether the token may follow the output, but for `min_tokens`."""
        if self.allowed and not (self.ends if token == END else token in self.allowed.encode()):
            return False
        text = bytes(output)
        if self.choices and not self._follows(token, text):
            return False
        words = [f"{space}{word}".encode() for word in self.bad_words for space in ("", " ")]
        return not any(token == word[-1] and text.endswith(word[:-1]) for word in words)

    def _follows(self, token: int, text: bytes) -> bool:
        if token == END:
            return text.decode() in self.choices
        return token < 256 and any(one.encode().startswith(text + bytes([token])) for one in self.choices)

    def beside(self, token: int) -> bytes:
        """What is read beside a token that was drawn for certain."""
        if self.top is None:
            return b""
        likely = [token, *(one for one in range(self.top + 1) if one != token)][: self.top]
        pairs = [struct.pack("<if", one, 0.0 if one == token else -9999.0) for one in likely]
        named = [struct.pack("<f", 0.0 if one == token else -9999.0) for one in self.named]
        return struct.pack("<fi", 0.0, 1) + b"".join(pairs + named)


NOTHING = Asks()


def counted(every: Iterable[Asks], unknown: Iterable[frozenset[str]]) -> Counter[str]:
    """How often each kind is asked, and how many workers do not know all."""
    counts: Counter[str] = Counter()
    for one in every:
        asked = {
            "asks: logprobs": one.top is not None, "asks: bad words": one.bad_words, "asks: ids": one.allowed,
            "asks: penalties": one.presence, "asks: grammar": one.choices,
        }  # fmt: skip
        counts.update(name for name, is_asked in asked.items() if is_asked)
    counts["old workers"] = sum(map(bool, unknown))
    return counts


def answer(prompt: str, max_tokens: int, min_tokens: int, asks: Asks) -> list[int]:
    """The tokens that echo draws: the prompt's one after the other, then the end, and from the beginning again.

    One that may not be drawn is replaced by the next one that may, and if there is none by the lowest. StopIteration:
    nothing may be drawn.
    """
    cycle, output = [*prompt.encode(), END], list[int]()
    while len(output) < max_tokens and END not in output:
        output.append(next(_drawn(cycle, output, min_tokens, asks)))
    return output


def _drawn(cycle: list[int], output: list[int], min_tokens: int, asks: Asks) -> Iterator[int]:
    at, may_end = len(output) % len(cycle), len(output) >= min_tokens
    for token in (*cycle[at:], *cycle[:at], *range(VOCABULARY)):
        if asks.allows(token, output) and (token != END or may_end):
            yield token
    # What a grammar has ended is over, however short it is.
    if asks.choices and asks.allows(END, output):
        yield END


def draw_asks(draw: random.Random, prompt: str) -> Asks:
    """Asks of one client: some read, some look back, some allow only a part, some want one of a few texts."""
    top = draw.choice([None, 0, 1, 5, 20])
    named = tuple(draw.sample(range(32, 123), draw.choice([0, 0, 1, 3]))) if top is not None else ()
    penalties = draw.choice([(0.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.5, 1.5)])
    if draw.random() < 0.2:
        return Asks(top, named, choices=draw.choice(CHOICES), presence=penalties[0], frequency=penalties[1])
    letters = sorted(set(prompt))
    allowed = "".join(draw.sample(letters, -(-len(letters) // 2))) if draw.random() < 0.3 else ""
    # Words that the answer would have: two or more of its characters, one after the other, or one alone.
    begins = [draw.randrange(len(prompt)) for _ in range(draw.choice([0, 0, 1, 3]))]
    words = (prompt[begin : begin + draw.choice([1, 2, 2, 4])] for begin in begins)
    bad_words = tuple(word for word in words if word.strip())
    return Asks(top, named, bad_words, allowed, draw.random() < 0.5, (), *penalties)


def draw_unknown(draw: random.Random) -> frozenset[str]:
    """Asks that a worker of another release does not know: none, some, or all."""
    if draw.random() < 0.6:
        return frozenset()
    return frozenset(draw.choice([LOOKED_FOR, ASK_NAMES, draw.sample(LOOKED_FOR, 2)]))
