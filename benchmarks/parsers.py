"""Time per delta of the gateway's parsers: plain text with a parser on, reasoning, and a call's arguments.

Deltas are as a detokenizer cuts them, about four characters each; nothing else runs. The baseline is a loop that makes
a `Text` of each delta and has no parser.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from nodes.gateway.parsers import CALLS, REASONING, ParserNames, make_parser
from nodes.gateway.parsers.events import Event, Text

TOOLS = {
    f"tool_{i}": {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
    for i in range(128)
}
PLAIN = "The scheduler sends one frame per step, and the detokenizer answers with one. Größe, 你好，世界。\n" * 20
ARGUMENTS = '{"n": 12, "text": "' + PLAIN.replace("\n", "\\n") + '"}'
OBJECT = '{"name": "tool_7", "%s": ' + ARGUMENTS + "}"
XML = "<tool_call>\n<function=tool_7>\n<parameter=text>\n" + PLAIN + "\n</parameter>\n</function>\n</tool_call>"
WRITTEN = {
    "hermes": "<tool_call>\n" + OBJECT % "arguments" + "\n</tool_call>",
    "qwen3_coder": XML,
    "llama3_json": OBJECT % "parameters",
    "mistral": "[TOOL_CALLS]tool_7[ARGS]" + ARGUMENTS,
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>tool_7\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>tool_7<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>",
    "openai": "<|channel|>commentary to=functions.tool_7 <|constrain|>json<|message|>" + ARGUMENTS + "<|call|>",
}


def deltas(text: str) -> list[str]:
    """Pieces of one to seven characters, in turn."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        length = 1 + len(pieces) % 7
        pieces.append(text[at : at + length])
        at += length
    return pieces


def microseconds(make: Callable[[], Callable[[str], list[Event]]], text: str, rounds: int) -> float:
    """Per delta; the median of the rounds, each with a parser of its own."""
    pieces = deltas(text)
    taken: list[float] = []
    for _ in range(rounds):
        feed = make()
        start = time.perf_counter()
        for piece in pieces:
            feed(piece)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / len(pieces) * 1e6


def main() -> None:
    """Command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=25)
    rounds = options.parse_args().rounds
    none = microseconds(lambda: lambda text: [Text(text)], PLAIN, rounds)
    print(f"{len(TOOLS)} tools; microseconds per delta; without a parser {none:.2f}")
    print(f"{'calls':14}{'plain text':>12}{'a call':>12}")
    for name in CALLS:
        # Harmony's text is inside a message that the prompt has begun.
        tail = "<|start|>assistant<|channel|>final<|message|>" if name == "openai" else ""
        plain = microseconds(lambda: make_parser(ParserNames(name), tail, TOOLS).feed, PLAIN, rounds)  # noqa: B023
        call = microseconds(lambda: make_parser(ParserNames(name), "", TOOLS).feed, WRITTEN[name], rounds)  # noqa: B023
        print(f"{name:14}{plain:12.2f}{call:12.2f}")
    print(f"{'reasoning':14}{'reasoning':>12}{'text after':>12}")
    for name in REASONING:
        if name in ("qwen3", "deepseek_r1"):
            both = ParserNames("hermes", name)
            inside = microseconds(lambda: make_parser(both, "<think>\n", TOOLS).feed, PLAIN, rounds)  # noqa: B023
            after = microseconds(lambda: make_parser(both, "</think>\n", TOOLS).feed, PLAIN, rounds)  # noqa: B023
            print(f"{name:14}{inside:12.2f}{after:12.2f}")


if __name__ == "__main__":
    main()
