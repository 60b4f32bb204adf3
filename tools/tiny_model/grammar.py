"""The grammar of `tiny`: conversations whose every answer is known.

``sample(rng)`` draws one conversation; the same seed gives the same one. A tenth of all questions,
chosen by a hash of what they ask, is held out: ``training_examples`` never yields one in any turn,
``held_out_examples`` yields only conversations that end in one. Pure Python; read by the tokenizer,
training and evaluation scripts and by the tests.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Final

from tools.tiny_model import context, facts, numbers, words
from tools.tiny_model.calling import TOOL_FAMILIES, offer
from tools.tiny_model.conversation import Example, Message
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
PLAIN_FAMILY_NAMES: Final = (*FAMILIES, *NOTES_FAMILIES)
FAMILY_NAMES: Final = (*PLAIN_FAMILY_NAMES, *TOOL_FAMILIES)
MAX_TURNS: Final = 6
MAX_EARLIER_EXCHANGES: Final = 3
MAX_DRAWS: Final = 100


def sample(rng: Random, family: str | None = None, families: Sequence[str] = FAMILY_NAMES) -> Example:
    """Draw one conversation, of a given family of last question or of any of ``families``.

    Raises KeyError for a family that does not exist.
    """
    if family is None:
        family = rng.choices(families, [_weight(name) for name in families])[0]
    if family in TOOL_FAMILIES:
        return _with_tools(rng, family)
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


def training_examples(seed: int, families: Sequence[str] = FAMILY_NAMES) -> Iterator[Example]:
    """An endless stream without a held-out question in any turn."""
    rng = Random(f"training:{seed}")
    while True:
        example = sample(rng, None, families)
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


def _weight(family: str) -> float:
    if family in TOOL_FAMILIES:
        return TOOL_FAMILIES[family]
    return FAMILIES[family][0] if family in FAMILIES else NOTES_FAMILIES[family][0]


def _with_tools(rng: Random, family: str) -> Example:
    offered = offer(rng, family)
    system = _system_prompt(rng)
    messages = [Message("system", system)] if system else []
    if offered.tools:  # nothing but tools says that earlier questions may be answered by calls
        for _ in range(min(_num_earlier_turns(rng), MAX_EARLIER_EXCHANGES)):
            messages += offered.training_exchange(rng, lambda rng: _training_turn(rng, None))
    asked = offered.ask(rng, family, _short_turn)
    ends_in_result = family in ("call_result", "call_two_results")
    messages += asked.opening() if ends_in_result else [Message("user", asked.question)]
    answer = asked.last_answer() if ends_in_result else asked.first_answer()
    return Example(tuple(messages), answer, family, is_held_out(asked.key), offered.tools)


def _num_earlier_turns(rng: Random) -> int:
    draw = rng.random()
    if draw < 0.62:
        return 0
    if draw < 0.82:
        return 1
    return rng.randint(2, MAX_TURNS - 1)


def _training_turn(rng: Random, ask: Callable[[Random], Turn] | None) -> Turn:
    """A question that is not held out, by ``ask`` or of any family with a short answer."""
    num_draws = 0
    while True:
        # Of notes with two entries both may be held out: then it is another question.
        turn = _short_turn(rng) if ask is None or num_draws == MAX_DRAWS else ask(rng)
        if not is_held_out(turn.key):
            return turn
        num_draws = min(num_draws + 1, MAX_DRAWS)


def _short_turn(rng: Random) -> Turn:
    short = [row for name, row in FAMILIES.items() if not name.endswith("_long")]
    return rng.choices([row[1] for row in short], [row[0] for row in short])[0](rng)


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
