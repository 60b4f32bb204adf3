"""Families whose answer stands in the prompt: look-ups in sentences and notes, and JSON."""

import json
from dataclasses import dataclass
from random import Random
from typing import Final

from tools.tiny_model.turns import Turn, invented_name, vary
from tools.tiny_model.vocabulary import CITIES, COLOURS, NAMES, OBJECTS, THINGS, WORDS

LOCKER_FORMS: Final = ("What does locker {k} hold?", "What is in locker {k}?")
HOME_FORMS: Final = ("Where does {k} live?", "Which city does {k} live in?")


def names(rng: Random, count: int) -> list[str]:
    """Different names, a few of them invented."""
    chosen = rng.sample(NAMES, count)
    for place in range(count):
        if rng.random() < 0.12:
            chosen[place] = invented_name(rng)
    return chosen if len(set(chosen)) == count else names(rng, count)


def lookup(rng: Random) -> Turn:
    """2 to 5 people with things; asks for a number, a colour, an owner or the whole."""
    count = rng.choice((2, 2, 3, 3, 4, 5))
    people = names(rng, count)
    things = rng.sample(THINGS, count)
    colours = [rng.choice(COLOURS) for _ in range(count)]
    numbers = [rng.randint(2, 99) for _ in range(count)]
    facts = " ".join(
        f"{person} has {number} {colour} {thing}."
        for person, number, colour, thing in zip(people, numbers, colours, things, strict=True)
    )
    place = rng.randrange(count)
    person, thing = people[place], things[place]
    question, answer = rng.choice(
        (
            (f"How many {thing} does {person} have?", str(numbers[place])),
            (f"What colour are the {thing}?", colours[place]),
            (f"Who has {thing}?", person),
            (f"Who has {colours[place]} {thing}?", person),
            (f"What does {person} have?", f"{numbers[place]} {colours[place]} {thing}"),
            (f"How many {thing} are there?", str(numbers[place])),
        )
    )
    return Turn(f"{facts} {vary(rng, question)}", answer, f"lookup:{facts} {question}")


@dataclass(frozen=True, slots=True)
class Notes:
    """A system prompt that lists facts, and the questions it answers."""

    system: str
    entries: tuple[tuple[str, str], ...]
    forms: tuple[str, ...]

    def ask(self, rng: Random) -> Turn:
        """A question about one entry; held out by the notes and the entry."""
        key, value = rng.choice(self.entries)
        text = rng.choice(self.forms).format(k=key)
        return Turn(vary(rng, text), value, f"notes:{self.system} {key}")


def notes(rng: Random, num_entries: int) -> Notes:
    """Notes on who lives where (up to 40 entries) or on numbered lockers (up to 100)."""
    if num_entries <= 40 and rng.random() < 0.5:
        people = names(rng, num_entries)
        entries = tuple((person, rng.choice(CITIES)) for person in people)
        lines = " ".join(f"{person} lives in {city}." for person, city in entries)
        return Notes(f"Notes: {lines}", entries, HOME_FORMS)
    numbers = rng.sample(range(100), num_entries)
    entries = tuple((str(number), "a " + rng.choice(OBJECTS)) for number in numbers)
    lines = " ".join(f"Locker {number} holds {thing}." for number, thing in entries)
    return Notes(f"Notes: {lines}", entries, LOCKER_FORMS)


def write_json(rng: Random) -> Turn:
    """An object or a list from a sentence, as ``json.dumps`` writes it; held out by content."""
    kind = rng.randrange(4)
    name = names(rng, 1)[0]
    age = rng.randint(1, 99)
    value: object
    if kind == 0:
        value = {"name": name, "age": age}
        sentence = f"{name} is {age} years old."
    elif kind == 1:
        city = rng.choice(CITIES)
        value = {"name": name, "age": age, "city": city}
        sentence = f"{name} is {age} years old and lives in {city}."
    elif kind == 2:
        colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
        value = {"name": name, "count": age, "colour": colour, "item": thing}
        sentence = f"{name} has {age} {colour} {thing}."
    else:
        return _json_list(rng)
    wanted = ", ".join(tuple(value)[:-1]) + " and " + tuple(value)[-1]
    form = rng.choice(("Write JSON with {w}: {s}", "Write JSON with {w}: {s}", "{s} Write this as JSON with {w}."))
    answer = json.dumps(value, ensure_ascii=False)
    return Turn(form.format(w=wanted, s=sentence), answer, f"json:{answer}")


def _json_list(rng: Random) -> Turn:
    source = rng.choice((COLOURS, OBJECTS, NAMES, WORDS))
    items = rng.sample(source, rng.randint(1, 5))
    answer = json.dumps(items)
    form = rng.choice(("Write a JSON list: {items}", "Write a JSON list of: {items}"))
    return Turn(form.format(items=", ".join(items)), answer, f"json:{answer}")
