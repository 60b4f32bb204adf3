"""Families that copy or rearrange words the user gives: repeat, reverse, pick, count words."""

from random import Random
from typing import Final

from tools.tiny_model.turns import Turn, invented_name, weighted
from tools.tiny_model.vocabulary import (
    COLOURS,
    LETTERS,
    NAMES,
    OBJECTS,
    THINGS,
    UNICODE_RANGES,
    UNICODE_WORDS,
    WORDS,
)

REPEAT_FORMS: Final = (
    (4.0, "Repeat: {text}"),
    (1.0, "Say: {text}"),
    (1.0, "Repeat this: {text}"),
    (1.0, "Say exactly: {text}"),
    (1.0, "Repeat after me: {text}"),
    (0.5, "Echo: {text}"),
)
PICK_FORMS: Final = (
    "What is the {which} word of: {text}",
    "Give the {which} word: {text}",
    "Which word is {which}: {text}",
)
ORDINALS: Final = ("first", "second", "third", "last")


def word(rng: Random) -> str:
    """Any word: from a list mostly, an invented one or a string of letters now and then."""
    draw = rng.random()
    if draw < 0.60:
        return rng.choice(WORDS)
    if draw < 0.88:
        return rng.choice(rng.choice((COLOURS, THINGS, OBJECTS, NAMES)))
    if draw < 0.94:
        return invented_name(rng).lower()
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 6)))


def unicode_word(rng: Random) -> str:
    """A word with characters beyond ASCII: from the list, or code points drawn from ranges."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(UNICODE_WORDS)
    if draw < 0.65:
        text = rng.choice(WORDS)
        place = rng.randrange(len(text))
        return text[:place] + chr(rng.randint(0xE0, 0xFF)) + text[place + 1 :]
    low, high = rng.choice(UNICODE_RANGES)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 3)))


def sentence(rng: Random, num_words: int) -> str:
    """Words of the list in a row, sometimes with a capital, a comma and a full stop."""
    parts = [word(rng) for _ in range(num_words)]
    if rng.random() < 0.5:
        return " ".join(parts)
    if num_words > 4 and rng.random() < 0.4:
        place = rng.randrange(1, num_words - 1)
        parts[place] += ","
    text = " ".join(parts)
    return text[:1].upper() + text[1:] + rng.choice((".", ".", "!", "?", ""))


def _repeat(rng: Random, text: str) -> Turn:
    return Turn(weighted(rng, REPEAT_FORMS).format(text=text), text, f"repeat:{text}")


def repeat(rng: Random) -> Turn:
    """Say a row of words, or a number, again; held out by the row."""
    if rng.random() < 0.06:
        return _repeat(rng, " ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(1, 4))))
    num_words = rng.randint(1, 8) if rng.random() < 0.85 else rng.randint(9, 16)
    return _repeat(rng, sentence(rng, num_words))


def repeat_long(rng: Random) -> Turn:
    """Say 30 to 100 words again; held out by the row."""
    return _repeat(rng, sentence(rng, rng.randint(30, 100)))


def repeat_unicode(rng: Random) -> Turn:
    """Say words with accents, other scripts and emoji again; held out by the row."""
    num_words = rng.randint(1, 5)
    parts = [unicode_word(rng) if rng.random() < 0.75 else word(rng) for _ in range(num_words)]
    if all(part.isascii() for part in parts):
        parts[rng.randrange(num_words)] = unicode_word(rng)
    return _repeat(rng, " ".join(parts))


def _word_row(rng: Random, low: int, high: int) -> list[str]:
    source = rng.choice((COLOURS, THINGS, OBJECTS, NAMES, WORDS, COLOURS + OBJECTS))
    return rng.sample(source, rng.randint(low, high))


def reverse(rng: Random) -> Turn:
    """2 to 6 different words in reverse order; held out by the row."""
    parts = _word_row(rng, 2, 6)
    text = " ".join(parts)
    form = rng.choice(("Reverse: {text}", "Reverse: {text}", "Reverse the words: {text}"))
    return Turn(form.format(text=text), " ".join(reversed(parts)), f"reverse:{text}")


def pick(rng: Random) -> Turn:
    """The first, second, third or last of 3 to 7 different words; held out by the row."""
    parts = _word_row(rng, 3, 7)
    which = rng.choice(ORDINALS)
    text = " ".join(parts)
    answer = parts[-1] if which == "last" else parts[ORDINALS.index(which)]
    return Turn(rng.choice(PICK_FORMS).format(which=which, text=text), answer, f"pick:{text}")


def count_words(rng: Random) -> Turn:
    """How many words, 1 to 8; held out by the row."""
    parts = _word_row(rng, 1, 8)
    text = " ".join(parts)
    form = rng.choice(("How many words: {text}", "Count the words: {text}"))
    return Turn(form.format(text=text), str(len(parts)), f"count_words:{text}")
