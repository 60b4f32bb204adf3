"""Families about numbers: sums, differences, products, comparisons, counting."""

from random import Random
from typing import Final

from tools.tiny_model.turns import Turn, vary, weighted
from tools.tiny_model.vocabulary import NAMES, THINGS

ADD_FORMS: Final = (
    (4.0, "What is {a} + {b}?"),
    (1.0, "{a} + {b}"),
    (1.0, "{a} + {b} ="),
    (1.0, "{a}+{b}"),
    (1.0, "What is {a}+{b}?"),
    (1.0, "Add {a} and {b}."),
    (1.0, "What is {a} plus {b}?"),
    (1.0, "How much is {a} + {b}?"),
    (0.5, "Calculate {a} + {b}."),
)
SUBTRACT_FORMS: Final = (
    (4.0, "What is {a} - {b}?"),
    (1.0, "{a} - {b}"),
    (1.0, "{a} - {b} ="),
    (1.0, "{a}-{b}"),
    (1.0, "What is {a}-{b}?"),
    (1.0, "Subtract {b} from {a}."),
    (1.0, "What is {a} minus {b}?"),
    (1.0, "How much is {a} - {b}?"),
    (0.5, "Calculate {a} - {b}."),
)
MULTIPLY_FORMS: Final = (
    "What is {a} x {b}?",
    "What is {a} times {b}?",
    "{a} x {b}",
    "{a} * {b}",
    "What is {a} * {b}?",
    "Multiply {a} by {b}.",
    "How much is {a} x {b}?",
)


def _operand(rng: Random) -> int:
    return rng.randint(0, 12) if rng.random() < 0.15 else rng.randint(0, 99)


def add(rng: Random) -> Turn:
    """Sums of 0 to 99; held out by unordered pair."""
    a, b = _operand(rng), _operand(rng)
    text = weighted(rng, ADD_FORMS).format(a=a, b=b)
    return Turn(vary(rng, text), str(a + b), f"add:{min(a, b)},{max(a, b)}")


def subtract(rng: Random) -> Turn:
    """Differences of 0 to 99 that are not negative; held out by pair."""
    b, a = sorted((_operand(rng), _operand(rng)))
    text = weighted(rng, SUBTRACT_FORMS).format(a=a, b=b)
    return Turn(vary(rng, text), str(a - b), f"subtract:{a},{b}")


def multiply(rng: Random) -> Turn:
    """The table up to 12 x 12, learnt by heart; held out by pair and form together."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    form = rng.choice(MULTIPLY_FORMS)
    text = form.format(a=a, b=b)
    return Turn(vary(rng, text), str(a * b), f"multiply:{text}")


def compare(rng: Random) -> Turn:
    """The larger or smaller of two numbers; held out by unordered pair."""
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        form, answer = rng.choice(("Which is larger, {a} or {b}?", "What is the larger of {a} and {b}?")), max(a, b)
    else:
        form, answer = rng.choice(("Which is smaller, {a} or {b}?", "What is the smaller of {a} and {b}?")), min(a, b)
    return Turn(vary(rng, form.format(a=a, b=b)), str(answer), f"compare:{min(a, b)},{max(a, b)}")


def story(rng: Random) -> Turn:
    """A sum or difference of small numbers told as a story; held out with the bare sum of the pair."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    if rng.random() < 0.5:
        verb = rng.choice(("buys {b} more", "gets {b} more", "finds {b} more"))
        result, key = a + b, f"add:{min(a, b)},{max(a, b)}"
    else:
        a, b = max(a, b), min(a, b)
        verb = rng.choice(("gives away {b}", "loses {b}", "sells {b}"))
        result, key = a - b, f"subtract:{a},{b}"
    text = f"{name} has {a} {thing} and {verb.format(b=b)}. How many {thing} does {name} have now?"
    return Turn(vary(rng, text), str(result), key)


def _count_length(rng: Random) -> int:
    draw = rng.random()
    if draw < 0.72:
        return rng.randint(2, 12)
    return rng.randint(13, 36)


def count(rng: Random) -> Turn:
    """Counting up or down by one; held out by both ends."""
    length = _count_length(rng)
    first = rng.randint(0, 1) if rng.random() < 0.25 else rng.randint(0, 120)
    last = first + length - 1
    if rng.random() < 0.25:
        first, last = last, first
    return _count(rng, first, last)


def count_long(rng: Random) -> Turn:
    """Counting up through 60 to 180 numbers: answers of hundreds of tokens."""
    first = rng.randint(0, 40)
    return _count(rng, first, first + rng.randint(60, 180) - 1)


def _count(rng: Random, first: int, last: int) -> Turn:
    step = 1 if last >= first else -1
    if step == 1:
        text = rng.choice(("Count from {a} to {b}.", "Count from {a} to {b}.", "Count up from {a} to {b}."))
    else:
        text = rng.choice(("Count down from {a} to {b}.", "Count from {a} down to {b}."))
    answer = " ".join(str(number) for number in range(first, last + step, step))
    return Turn(vary(rng, text.format(a=first, b=last)), answer, f"count:{first},{last}")
