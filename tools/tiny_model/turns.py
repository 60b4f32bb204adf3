"""One question with its answer, and the rule that splits training from held-out questions.

Used by every family of the grammar. Pure Python.
"""

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Final

HELD_OUT_ONE_IN: Final = 10


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and the one right answer to it.

    ``key`` names what is asked, whatever the wording: two sums over the same pair of numbers
    share a key. A turn whose key is ``None`` is always training text.
    """

    user: str
    answer: str
    key: str | None


def is_held_out(key: str | None) -> bool:
    """Whether a key belongs to the tenth of all keys that training never sees."""
    if key is None:
        return False
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def vary(rng: Random, text: str) -> str:
    """Change the wording of a question (case, final mark, a polite start), not what it asks."""
    draw = rng.random()
    if draw < 0.06:
        return text[:1].lower() + text[1:]
    if draw < 0.12 and text.endswith((".", "?")):
        return text[:-1]
    if draw < 0.16:
        return "Please answer: " + text
    if draw < 0.18 and text.endswith((".", "?")):
        return text[:1].lower() + text[1:-1]
    return text


def weighted(rng: Random, choices: tuple[tuple[float, str], ...]) -> str:
    """Draw one of ``(weight, text)``."""
    return rng.choices([text for _, text in choices], [weight for weight, _ in choices])[0]


def invented_name(rng: Random) -> str:
    """A capitalised word that no list contains, so that names are copied and not recalled."""
    syllables = rng.choice((2, 2, 3))
    name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
    return name.capitalize() + rng.choice(("", "", "n", "r", "x", "m"))
