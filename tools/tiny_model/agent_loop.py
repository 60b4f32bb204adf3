"""An agent's loop on `tiny`: a question, the calls that it makes, their results, the answer.

Scores what `evaluate.py` loads. Right calls have the right names and arguments, as JSON, in order, and nothing beside
them; a question that needs no tool, or has none, must get no call. The answer after the results is compared exactly.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tools.tiny_model.conversation import CALL_END, CALL_START, Example, answer_of
from tools.tiny_model.grammar import held_out_examples

# Of a hundred questions so many need one call, two calls, no tool, a tool that is not there.
SHARES: Final = {"call_result": 50, "call_two_results": 30, "call_none": 10, "call_missing": 10}
_CALL: Final = re.compile(f"{CALL_START}\n(.*)\n{CALL_END}\n?")


@dataclass(frozen=True, slots=True)
class LoopScore:
    """Of ``questions``, how many got the right calls, and how many the right answer after the right calls."""

    questions: int
    right_calls: int
    right_answers: int


def held_out_loops(seed: int, count: int) -> list[Example]:
    """Held-out conversations that end where the last answer is due, with the right calls and results in them."""
    return [e for family, share in SHARES.items() for e in held_out_examples(seed, family, count * share // 100)]


def before_calls(example: Example) -> Example:
    """The same conversation up to the last question."""
    last = max(place for place, message in enumerate(example.messages) if message.role == "user")
    calls = example.messages[last + 1].calls if last + 1 < len(example.messages) else ()
    return replace(example, messages=example.messages[: last + 1], answer=answer_of(calls) or example.answer)


def sent_messages(example: Example) -> list[dict[str, Any]]:
    """The conversation as clients send it: calls with ids, arguments as text, results with the ids of their calls."""
    messages = [message.openai() for message in example.messages]
    ids: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            message["tool_call_id"] = ids.pop(0)
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{place}_{number}"
            ids.append(call["id"])
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def calls_of(text: str) -> list[Any] | None:
    """The calls that an answer makes; None for marks that enclose no JSON or stand beside other text."""
    if CALL_START not in text and CALL_END not in text:
        return []
    if _CALL.sub("", text):
        return None
    try:
        return [json.loads(call) for call in _CALL.findall(text)]
    except ValueError:
        return None


def run_loops(answer: Callable[[Sequence[Example]], list[str]], loops: Sequence[Example]) -> LoopScore:
    """Ask every question, then go on with those whose calls were right."""
    asked = [before_calls(loop) for loop in loops]
    right: list[Example] = []
    answers = 0
    for loop, one, said in zip(loops, asked, answer(asked), strict=True):
        if calls_of(said) != calls_of(one.answer):
            continue
        right.append(loop)
        answers += one.messages == loop.messages and said == loop.answer
    going_on = [loop for loop in right if loop.messages[-1].role == "tool"]
    said_last = answer(going_on)
    answers += sum(said == loop.answer for loop, said in zip(going_on, said_last, strict=True))
    return LoopScore(len(loops), len(right), answers)
