"""Six tools, what people ask of them, and what comes of it.

A request is a question, the call that it needs, a result that the tool might give and what to say of it. Names,
numbers and texts stand in the question and the result, so that they are copied and not recalled.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from tools.tiny_model.conversation import Call, Tool
from tools.tiny_model.turns import invented_name
from tools.tiny_model.vocabulary import CITIES, NAMES, OBJECTS, SKIES, THINGS
from tools.tiny_model.words import sentence, word

NO_TOOL: Final = "I have no tool for that."


@dataclass(frozen=True, slots=True)
class Request:
    """``question`` asks for ``call``; ``about`` is what the answer calls it, before the tool's ``result``."""

    question: str
    call: Call
    result: str
    about: str

    def answer(self) -> str:
        """What the assistant says when the result is there."""
        return f"{self.about}: {self.result}"


@dataclass(frozen=True, slots=True)
class Service:
    """A tool with the wordings of questions for it; ``draw`` gives arguments and a usual result."""

    tool: Tool
    forms: tuple[str, ...]
    about: str
    draw: Callable[[Random], tuple[dict[str, Any], str]]

    def request(self, rng: Random) -> Request:
        """One question for this tool."""
        arguments, usual = self.draw(rng)
        return Request(
            rng.choice(self.forms).format(**arguments),
            Call(self.tool.name, json.dumps(arguments, ensure_ascii=False)),
            _result(rng, usual),
            self.about.format(**arguments),
        )


def _result(rng: Random, usual: str) -> str:
    """A tool may answer anything: now and then words, or an object, take the place of what is usual."""
    draw = rng.random()
    if draw < 0.70:
        return usual
    if draw < 0.85:
        return sentence(rng, rng.randint(1, 7))
    return json.dumps({word(rng): rng.choice((rng.randint(0, 999), word(rng))) for _ in range(rng.randint(1, 2))})


def _city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else invented_name(rng)


def _number(rng: Random) -> int:
    return rng.randint(2, 30) if rng.random() < 0.5 else rng.randint(2, 400)


def _weather(rng: Random) -> tuple[dict[str, Any], str]:
    degrees, sky = rng.randint(-20, 40), rng.choice(SKIES)
    return {"city": _city(rng)}, rng.choice((f"{degrees} degrees and {sky}", f"{sky}, {degrees} degrees", sky))


def _time(rng: Random) -> tuple[dict[str, Any], str]:
    return {"city": _city(rng)}, f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def _price(rng: Random) -> tuple[dict[str, Any], str]:
    item = rng.choice(OBJECTS + THINGS) if rng.random() < 0.6 else word(rng)
    return {"item": item}, rng.choice((f"{_number(rng)} coins", f"{rng.randint(1, 99)}.{rng.randrange(100):02}"))


def _timer(rng: Random) -> tuple[dict[str, Any], str]:
    return {"minutes": _number(rng)}, rng.choice(("started", "set", "running", "done", "ok"))


def _send(rng: Random) -> tuple[dict[str, Any], str]:
    name = rng.choice(NAMES) if rng.random() < 0.6 else invented_name(rng)
    text = " ".join(word(rng) for _ in range(rng.randint(1, 7)))
    return {"name": name, "text": text}, rng.choice(("sent", "delivered", "ok", f"sent at {rng.randint(1, 12)}"))


def _book(rng: Random) -> tuple[dict[str, Any], str]:
    return {"city": _city(rng), "nights": _number(rng)}, rng.choice(("booked", "done", f"room {rng.randint(1, 999)}"))


SERVICES: Final = (
    Service(
        Tool("weather", (("city", "string"),)),
        ("What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}."),
        "Weather in {city}",
        _weather,
    ),
    Service(
        Tool("time", (("city", "string"),)),
        ("What time is it in {city}?", "What is the time in {city}?", "Tell me the time in {city}."),
        "Time in {city}",
        _time,
    ),
    Service(
        Tool("price", (("item", "string"),)),
        ("What is the price of the {item}?", "What does the {item} cost?", "Tell me the price of the {item}."),
        "Price of the {item}",
        _price,
    ),
    Service(
        Tool("timer", (("minutes", "integer"),)),
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes."),
        "Timer of {minutes} minutes",
        _timer,
    ),
    Service(
        Tool("send", (("name", "string"), ("text", "string"))),
        ('Send {name} the message "{text}".', 'Send "{text}" to {name}.', 'Tell {name} "{text}".'),
        "Message to {name}",
        _send,
    ),
    Service(
        Tool("book", (("city", "string"), ("nights", "integer"))),
        ("Book a room in {city} for {nights} nights.", "Book {nights} nights in {city}."),
        "Room in {city}",
        _book,
    ),
)


def pair(rng: Random, first: Service, second: Service) -> tuple[str, tuple[Request, Request]]:
    """Two requests, and one question that makes both."""
    one, two = first.request(rng), second.request(rng)
    if first is second and first.tool.parameters == (("city", "string"),) and rng.random() < 0.5:
        city = json.loads(two.call.arguments)["city"]
        return f"{one.question[:-1]} and in {city}{one.question[-1]}", (one, two)
    return f"{one.question[:-1]} and {two.question[:1].lower()}{two.question[1:]}", (one, two)
