"""What every agent here is asked, the tools that it has for it, and how it tells what came of it.

Runs in a client's own environment, as `python with_….py URL TIMES`.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

URL = sys.argv[1]
QUESTION = "What is the weather in Rome and what time is it in Paris?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: Where.
    """
    return "21 degrees and sunny" if city == "Rome" else f"no weather in {city}"


def time(city: str) -> str:
    """Tell the time in a city.

    Args:
        city: Where.
    """
    return "12:30" if city == "Paris" else f"no time in {city}"


def result(name: str, arguments: str) -> str:
    """What the tool of this name says to arguments in JSON."""
    return {"weather": weather, "time": time}[name](**json.loads(arguments))


def report(answers: Callable[[], Any]) -> None:
    """Print a line of JSON with what `answers` found, by the way of asking, as often as the caller wants."""
    for _ in range(int(sys.argv[2])):
        found = answers()
        print(json.dumps(asyncio.run(found) if inspect.iscoroutine(found) else found), flush=True)
