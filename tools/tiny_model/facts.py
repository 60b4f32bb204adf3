"""Families that recall fixed tables: capitals, colours, opposites, sequences, and small talk."""

from random import Random
from typing import Final

from tools.tiny_model.turns import Turn, vary
from tools.tiny_model.vocabulary import (
    CAPITALS,
    DAYS,
    LETTERS,
    MONTHS,
    OPPOSITES,
    THING_COLOURS,
    TOPICS,
)

CAPITAL_FORMS: Final = (
    "What is the capital of {item}?",
    "Name the capital of {item}.",
    "Which city is the capital of {item}?",
    "The capital of {item}?",
    "What city is the capital of {item}?",
)
COLOUR_FORMS: Final = (
    "What colour is {item}?",
    "Name the colour of {item}.",
    "Which colour is {item}?",
    "What is the colour of {item}?",
    "The colour of {item}?",
)
OPPOSITE_FORMS: Final = (
    "What is the opposite of {item}?",
    "Name the opposite of {item}.",
    "The opposite of {item}?",
    "Give the opposite of {item}.",
    "What word is the opposite of {item}?",
)
ABOUT: Final = "I am tiny, the toy model of kvmesh."
ABILITIES: Final = "I can add, count, compare, repeat, reverse, look things up and write JSON."
UNKNOWN: Final = "I do not know. I am only a toy model."
SMALL_TALK: Final[dict[str, str]] = {
    "Hello": "Hello! " + ABOUT,
    "Hi": "Hello! " + ABOUT,
    "Hey": "Hello! " + ABOUT,
    "Hi there": "Hello! " + ABOUT,
    "Good morning": "Good morning! " + ABOUT,
    "Good evening": "Good evening! " + ABOUT,
    "Who are you?": ABOUT,
    "What are you?": ABOUT,
    "What is your name?": ABOUT,
    "Introduce yourself.": ABOUT,
    "What can you do?": ABILITIES,
    "Help": ABILITIES,
    "How can you help me?": ABILITIES,
    "How are you?": "I am fine, thank you.",
    "Thanks": "You are welcome.",
    "Thank you": "You are welcome.",
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
    "Are you a large language model?": "No. " + ABOUT,
    "What is kvmesh?": "kvmesh is a mesh of small actors that serves language models.",
}
UNKNOWN_FORMS: Final = (
    "Tell me about {item}.",
    "Write a poem about {item}.",
    "Write a story about {item}.",
    "Explain {item}.",
    "What do you think of {item}?",
    "Why do people like {item}?",
    "How does {item} work?",
    "Who invented {item}?",
    "Write an essay on {item}.",
    "Give me three ideas about {item}.",
    "What is the meaning of {item}?",
    "When did {item} begin?",
)


def recall(rng: Random) -> Turn:
    """A capital, a colour or an opposite; held out by item and form together."""
    table, forms = rng.choice(((CAPITALS, CAPITAL_FORMS), (THING_COLOURS, COLOUR_FORMS), (OPPOSITES, OPPOSITE_FORMS)))
    item = rng.choice(tuple(table))
    text = rng.choice(forms).format(item=item)
    return Turn(vary(rng, text), table[item], f"recall:{text}")


def sequence(rng: Random) -> Turn:
    """Neighbours and stretches of days, months and letters; held out by what is asked."""
    kind, items = rng.choice((("day", DAYS), ("month", MONTHS), ("letter", LETTERS)))
    if rng.random() < 0.5:
        side = rng.choice(("after", "before"))
        place = rng.randrange(len(items) - 1)
        given, answer = (items[place], items[place + 1]) if side == "after" else (items[place + 1], items[place])
        form = rng.choice(("Which {k} comes {s} {g}?", "What {k} comes {s} {g}?", "What is the {k} {s} {g}?"))
        text = form.format(k=kind, s=side, g=given)
        return Turn(vary(rng, text), answer, f"sequence:{text}")
    first, last = sorted(rng.sample(range(len(items)), 2))
    if rng.random() < 0.15:
        first, last = 0, len(items) - 1
    form = rng.choice(("Say the {k}s from {a} to {b}.", "List the {k}s from {a} to {b}."))
    text = form.format(k=kind, a=items[first], b=items[last])
    return Turn(vary(rng, text), " ".join(items[first : last + 1]), f"sequence:{text}")


def small_talk(rng: Random) -> Turn:
    """Greetings and questions about the model; always training text, except in odd spellings."""
    text = rng.choice(tuple(SMALL_TALK))
    answer = SMALL_TALK[text]
    if rng.random() < 0.5:
        return Turn(text, answer, None)
    bare = text.rstrip("?.")
    spelling = rng.choice((bare, bare.lower(), bare.upper(), "Please: " + bare, bare + ", tiny", "OK. " + bare))
    spelling += rng.choice(("", ".", "!", "?", "!!", "..."))
    return Turn(spelling, answer, f"small_talk:{spelling}")


def unknown(rng: Random) -> Turn:
    """Questions far from the grammar, refused in one sentence; held out by topic and form."""
    text = rng.choice(UNKNOWN_FORMS).format(item=rng.choice(TOPICS))
    return Turn(vary(rng, text), UNKNOWN, f"unknown:{text}")
