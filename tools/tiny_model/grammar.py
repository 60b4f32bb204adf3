"""The grammar of `tiny`: conversations whose every answer is known.

``sample(rng)`` draws one conversation; the same seed gives the same one. A tenth of all questions,
chosen by a hash of what they ask, is held out: ``training_examples`` never yields one in any turn,
``held_out_examples`` yields only conversations that end in one. Pure Python; read by the tokenizer,
training and evaluation scripts and by the tests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from tools.tiny_model import context, facts, numbers, words
from tools.tiny_model.turns import Turn, is_held_out
from tools.tiny_model.vocabulary import SYSTEM_PROMPTS

FAMILIES: Final[dict[str, tuple[float, Callable[[Random], Turn]]]] = {
    "add": (14.0, numbers.add),
    "subtract": (15.0, numbers.subtract),
    "multiply": (5.0, numbers.multiply),
    "compare": (5.0, numbers.compare),
    "story": (6.0, numbers.story),
    "count": (7.0, numbers.count),
    "count_long": (0.35, numbers.count_long),
    "repeat": (8.0, words.repeat),
    "repeat_long": (0.6, words.repeat_long),
    "repeat_unicode": (5.0, words.repeat_unicode),
    "reverse": (5.0, words.reverse),
    "pick": (3.0, words.pick),
    "count_words": (2.0, words.count_words),
    "recall": (4.0, facts.recall),
    "sequence": (6.0, facts.sequence),
    "small_talk": (2.5, facts.small_talk),
    "unknown": (1.5, facts.unknown),
    "lookup": (10.0, context.lookup),
    "json": (6.0, context.write_json),
}
NOTES_FAMILIES: Final[dict[str, tuple[float, int, int]]] = {
    # family: weight, fewest and most entries
    "notes": (6.0, 2, 16),
    "notes_long": (0.7, 40, 90),
}
FAMILY_NAMES: Final = (*FAMILIES, *NOTES_FAMILIES)
MAX_TURNS: Final = 6


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends in a user message, and the one right answer to it.

    ``held_out`` says that the last question is in the held-out tenth; earlier ones never are.
    """

    messages: tuple[Message, ...]
    answer: str
    family: str
    held_out: bool


def sample(rng: Random, family: str | None = None) -> Example:
    """Draw one conversation, of a given family of last question or of any.

    Raises KeyError for a family that does not exist.
    """
    if family is None:
        weights = [*(weight for weight, _ in FAMILIES.values()), *(row[0] for row in NOTES_FAMILIES.values())]
        family = rng.choices(FAMILY_NAMES, weights)[0]
    if family in NOTES_FAMILIES:
        _, fewest, most = NOTES_FAMILIES[family]
        notes = context.notes(rng, rng.randint(fewest, most))
        system, ask, share_earlier = notes.system, notes.ask, 0.7
    else:
        system, ask, share_earlier = _system_prompt(rng), FAMILIES[family][1], 0.15
    messages = [Message("system", system)] if system else []
    for _ in range(_num_earlier_turns(rng)):
        turn = _training_turn(rng, ask if rng.random() < share_earlier else None)
        messages += [Message("user", turn.user), Message("assistant", turn.answer)]
    last = ask(rng)
    messages.append(Message("user", last.user))
    return Example(tuple(messages), last.answer, family, is_held_out(last.key))


def training_examples(seed: int) -> Iterator[Example]:
    """An endless stream without a held-out question in any turn."""
    rng = Random(f"training:{seed}")
    while True:
        example = sample(rng)
        if not example.held_out:
            yield example


def held_out_examples(seed: int, family: str, count: int) -> list[Example]:
    """Different conversations whose last question training never saw."""
    rng = Random(f"held out:{seed}:{family}")
    found: dict[Example, None] = {}
    while len(found) < count:
        example = sample(rng, family)
        if example.held_out:
            found[example] = None
    return list(found)


def _num_earlier_turns(rng: Random) -> int:
    draw = rng.random()
    if draw < 0.62:
        return 0
    if draw < 0.82:
        return 1
    return rng.randint(2, MAX_TURNS - 1)


def _training_turn(rng: Random, ask: Callable[[Random], Turn] | None) -> Turn:
    """A question that is not held out, by ``ask`` or of any family with a short answer."""
    while True:
        chosen = ask
        if chosen is None:
            short = [row for name, row in FAMILIES.items() if not name.endswith("_long")]
            chosen = rng.choices([row[1] for row in short], [row[0] for row in short])[0]
        turn = chosen(rng)
        if not is_held_out(turn.key):
            return turn


def _system_prompt(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.65:
        return ""
    if draw < 0.87:
        return rng.choice(SYSTEM_PROMPTS)
    if draw < 0.90:
        return context.notes(rng, rng.randint(2, 10)).system
    if draw < 0.995:
        return words.sentence(rng, rng.randint(2, 30))
    return words.sentence(rng, rng.randint(100, 300))
