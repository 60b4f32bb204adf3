"""The tools of the Berkeley Function Calling Leaderboard: each is refused by name, or every call of it is valid.

A call is required, an answer is drawn at random under the grammar of each form, and the form's parser reads it in
pieces. CI reads a sample of the tools, without their descriptions; `make test-all` all that the folder BFCL_DATA has,
the data of the package bfcl-eval, which is under Apache-2.0.
"""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nodes.asks import InvalidAsk, check_asks
from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.errors import BadRequest
from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.jobs.constraints import with_calls
from nodes.gateway.jobs.validation import Job
from tests.nodes.gateway.drawn_calls import FORMS, TAILS, chat_with, check_calls, drawn, form
from tests.nodes.gateway.parsers.whole import whole_answer

SAMPLE = Path(__file__).parent / "published_tools"
VARIABLE = "BFCL_DATA"
HOW = (
    "no tools given: `pip download --no-deps bfcl-eval`, unzip the wheel, and set"
    f" {VARIABLE} to its folder bfcl_eval/data"
)
# As the leaderboard maps them for OpenAI's models, but for `any`, which it makes a string.
TYPES = {
    "dict": "object", "hashmap": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array",
    "arraylist": "array", "char": "string", "": "string",
}  # fmt: skip
KINDS = ("array", "boolean", "integer", "number", "object", "string")

Tools = list[dict[str, Any]]


class Published(NamedTuple):
    """Each tool once, by itself, and each choice of several that a question offers."""

    alone: list[Tools]
    together: list[Tools]


def schema_of(given: dict[str, Any]) -> dict[str, Any]:
    """A schema of the leaderboard's as a JSON schema."""
    schema = dict(given)
    if "type" in schema:
        kind = schema.pop("type").lower()
        kind = TYPES.get(kind, kind)
        assert kind in (*KINDS, "any"), kind
        schema |= {} if kind == "any" else {"type": kind}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schema[key] = schema_of(schema[key])
    if "properties" in schema:
        schema["properties"] = {name: schema_of(one) for name, one in schema["properties"].items()}
    return schema


def questions(folder: Path) -> Iterator[Tools]:
    """The tools of each line that has some; lines of names and of answers have none."""
    for file in sorted(folder.rglob("*.json")):
        for line in file.read_text().splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                # The file is one document of many lines, which has no tools.
                break
            tools = said.get("function", [said] if "parameters" in said else [])
            yield [
                {"name": tool["name"], "parameters": schema_of(tool["parameters"])}
                for tool in ([tools] if isinstance(tools, dict) else tools)
            ]


def published(folder: Path) -> Published:
    alone, together = dict[str, Tools](), dict[str, Tools]()
    for tools in questions(folder):
        alone |= {json.dumps(tool): [tool] for tool in tools}
        by_name = [*{tool["name"]: tool for tool in tools}.values()]
        if len(by_name) > 1:
            together[json.dumps(by_name)] = by_name
    return Published([*alone.values()], [*together.values()])


def required(tools: Tools, of: AnswerForm) -> Job | BadRequest | InvalidAsk:
    """A chat that has to call these tools, as it is checked before a model sees it; or why it is refused."""
    try:
        job = with_calls(chat_with(tools, tool_choice="required", parallel_tool_calls=len(tools) > 1), of)
        check_asks(job.prepare.checks)
    except (BadRequest, InvalidAsk) as error:
        return error
    return job


def read_in_pieces(text: str, job: Job, of: AnswerForm, tail: str, dice: random.Random) -> list[str]:
    """What an answer calls: each call is valid, and there is nothing beside them."""
    cuts = [dice.randrange(len(text) + 1) for _ in range(dice.choice([0, 3, len(text)]))]
    sample = Answers(of, job.answer, tail, ["r-0"]).samples[0]
    pieces = [text[begin:end] for begin, end in pairwise([0, *sorted(cuts), len(text)])]
    answer = whole_answer([event for piece in pieces for event in sample.feed(piece)] + sample.close())
    assert not answer.text.strip(), text
    offered = [{"name": name, "parameters": parameters} for name, parameters in job.answer.tools.items()]
    return check_calls(answer.calls, offered)


def check_form(name: str, asked: Sequence[Tools], *, has_tokens: bool) -> Counter[str]:
    """Draws an answer for each choice of tools. Returns how many were valid, and how many were refused as what."""
    of, tail, seen = form(name, has_tokens=has_tokens), TAILS.get(name, ""), Counter[str]()
    for seed, tools in enumerate(asked):
        job = required(tools, of)
        if not isinstance(job, Job):
            named = re.fullmatch(r"tools\.([0-9]+)\.function\.parameters", job.param or "")
            assert named, job
            seen[f"{tools[int(named[1])]['name']}: {job}"] += 1
            continue
        text, is_over = drawn(job, of, seed, tail)
        assert is_over, text
        called = read_in_pieces(text, job, of, tail, random.Random(seed))
        assert called == [tools[0]["name"]] if len(tools) == 1 else called, text
        seen["valid"] += 1
    return seen


def check_all(name: str, of: Published) -> Counter[str]:
    seen = Counter[str]()
    for asked, has_tokens in ((of.alone, True), (of.together, False)):
        found = check_form(name, asked, has_tokens=has_tokens)
        print(
            f"{name}, marks are {'tokens' if has_tokens else 'letters'}, {len(asked)} choices of tools: {dict(found)}"
        )
        seen += found
    return seen


@pytest.mark.parametrize("name", FORMS)
def test_sampled_tools_are_called_validly_or_refused_by_name(name: str) -> None:
    seen = check_all(name, published(SAMPLE))
    assert seen.pop("valid") > 40
    assert {refusal.partition(":")[0] for refusal in seen} == {"get_response"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORMS)
def test_all_tools_are_called_validly_or_refused_by_name(name: str) -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(HOW)
    found = published(Path(folder))
    assert len(found.alone) > 3000, f"{VARIABLE} has {len(found.alone)} tools: {HOW}"
    seen = check_all(name, found)
    assert seen["valid"] > 0.99 * seen.total()
