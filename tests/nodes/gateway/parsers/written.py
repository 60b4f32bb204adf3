"""Answers as models write them: each form by hand, after the templates that render it; random tools and arguments."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from nodes.gateway.parsers import ParserNames, make_parser
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text

Calls = list[tuple[str, dict[str, Any]]]
NAMES = ["get", "get_weather", "get_weather_now", "a", "größe", "run-it", "ns.tool"]
TYPES = ["string", "integer", "number", "boolean", "object", "array"]
TAILS = {"openai": "<|end|><|start|>assistant"}
FORMS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_named", "deepseek_v3", "deepseek_v31", "openai")
MARKS = [
    "<tool_call>", "</tool_call>", "<function=get>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```", "<|start|>assistant", "<|channel|>final", "<|message|>",
    "<|end|>", "<|call|>", "<think>", "</think>", '{"name": "get", "arguments": {', '"parameters": {', "{", "}", "; ",
    " to=functions.get", '"', "\\", "\n", " ",
]  # fmt: skip
WORDS = ["I ", "look ", "it up", ".\n", "ß", "你好", "🙂", "a < b ", "<", "x[0]", "12", "- ", "\n\n", "ok "]
LETTERS = [
    "a",
    "B",
    " ",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "\n",
    "\t",
    "é",
    "🙂",
    "</tool_call>",
    "<|end|>",
    "[ARGS]",
    "null",
]


class Written(NamedTuple):
    text: str
    tools: dict[str, Any]
    before: str
    calls: Calls
    after: str


def names_of(form: str) -> ParserNames:
    return ParserNames("mistral" if form == "mistral_named" else form)


def parse(form: str, text: str, tools: dict[str, Any], cuts: list[int] | None = None) -> list[Event]:
    """Events of `text`, given whole, or in pieces that begin at `cuts`."""
    parser = make_parser(names_of(form), TAILS.get(form, ""), tools)
    events: list[Event] = []
    bounds = [0, *(range(1, len(text)) if cuts is None else cuts), len(text)]
    for begin, end in pairwise(bounds):
        events += parser.feed(text[begin:end])
    return events + parser.close()


def merged(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text | Reasoning) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            out[-1] = CallArguments(event.call_index, last.text + event.text, last.source + event.source)
        else:
            out.append(event)
    return out


def check_order(events: list[Event], tools: dict[str, Any]) -> None:
    """Calls one after another, of offered tools; whole ones have an object for arguments."""
    num_calls, arguments = 0, None
    for event in events:
        match event:
            case CallBegin():
                assert arguments is None
                assert event.call_index == num_calls
                assert event.name in tools
                arguments = ""
            case CallArguments():
                assert arguments is not None
                assert event.call_index == num_calls
                arguments += event.text
            case CallEnd():
                assert event.call_index == num_calls
                assert not event.whole or isinstance(json.loads(arguments), dict)
                num_calls, arguments = num_calls + 1, None
            case _:
                assert arguments is None


def write_hermes(calls: Calls, dumps: Callable[[Any], str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def write_qwen3_coder(calls: Calls, dumps: Callable[[Any], str]) -> str:
    def value(one: Any) -> str:
        return one if isinstance(one, str) else dumps(one)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value(one)}\n</parameter>\n" for key, one in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def write_llama3_json(calls: Calls, dumps: Callable[[Any], str]) -> str:
    return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {dumps(arguments)}}}' for name, arguments in calls)


def write_mistral(calls: Calls, dumps: Callable[[Any], str]) -> str:
    items = (f'{{"name": {json.dumps(n)}, "arguments": {dumps(a)}, "id": "abcdefghi"}}' for n, a in calls)
    return "[TOOL_CALLS][" + ", ".join(items) + "]"


def write_mistral_named(calls: Calls, dumps: Callable[[Any], str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def write_deepseek_v3(calls: Calls, dumps: Callable[[Any], str]) -> str:
    items = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(items) + "<｜tool▁calls▁end｜>"


def write_deepseek_v31(calls: Calls, dumps: Callable[[Any], str]) -> str:
    items = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(items) + "<｜tool▁calls▁end｜>"


def write_openai(calls: Calls, dumps: Callable[[Any], str]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>"
        for n, a in calls
    )


def random_value(random: random.Random, depth: int = 0) -> Any:
    kind = random.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [random_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 6:
        return {random_string(random): random_value(random, depth + 1) for _ in range(random.randrange(4))}
    return (random_string(random), random.randrange(-99, 10**6), random.random() * 100, random.random() < 0.5, None)[
        kind
    ]


def random_string(random: random.Random) -> str:
    return "".join(random.choices(LETTERS, k=random.randrange(7)))


def value_of_type(random: random.Random, kind: str) -> Any:
    values = {
        "string": lambda: random_string(random), "integer": lambda: random.randrange(-99, 10**6),
        "number": lambda: random.choice((random.random(), 3)), "boolean": lambda: random.random() < 0.5,
        "object": lambda: {random_string(random): random_value(random, 1) for _ in range(2)},
        "array": lambda: [random_value(random, 1) for _ in range(2)],
    }  # fmt: skip
    return values[kind]()


def random_tools(random: random.Random) -> dict[str, Any]:
    names = random.sample(NAMES, random.randint(1, len(NAMES)))
    keys = ["x", "city", "größe", "x_y"]
    return {
        name: {"properties": {key: {"type": random.choice(TYPES)} for key in random.sample(keys, random.randrange(4))}}
        for name in names
    }


def random_text(random: random.Random) -> str:
    return "".join(random.choices(WORDS, k=random.randrange(6)))


def random_answer(random: random.Random, form: str) -> Written:
    """Well-formed: text, calls, text."""
    tools = random_tools(random)
    calls: Calls = []
    for _ in range(random.randrange(4)):
        name = random.choice(list(tools))
        properties = tools[name]["properties"]
        chosen = random.sample(list(properties), random.randint(0, len(properties)))
        calls.append((name, {key: value_of_type(random, properties[key]["type"]) for key in chosen}))
    ascii_only, indent = random.random() < 0.5, random.choice((None, None, 1))
    body = WRITE[form](calls, lambda one: json.dumps(one, ensure_ascii=ascii_only, indent=indent)) if calls else ""
    before, after = random_text(random), random_text(random)
    if form == "llama3_json" and calls and before:
        before += "\n"
    if form == "openai":
        text = f"<|channel|>commentary<|message|>{before}<|end|>" if before else ""
        text += body if text else body.removeprefix("<|start|>assistant")
        text += f"<|start|>assistant<|channel|>final<|message|>{after}" if after and calls else ""
        return Written(text, tools, before, calls, after if calls else "")
    return Written(before + body + after, tools, before, calls, after)


def damaged(random: random.Random, text: str) -> str:
    """`text` with pieces lost, put in or moved, or cut."""
    for _ in range(random.randint(1, 4)):
        at, to = sorted((random.randint(0, len(text)), random.randint(0, len(text))))
        match random.randrange(4):
            case 0:
                text = text[:at] + random.choice(MARKS) + text[at:]
            case 1:
                text = text[:at] + text[min(to, at + random.randint(1, 8)) :]
            case 2:
                text = text[:at] + text[at : at + 30] + text[at:]
            case _:
                text = text[: max(to, len(text) // 2)]
    return text


def garbage(random: random.Random) -> str:
    return "".join(random.choices(MARKS + WORDS, k=random.randrange(16)))


WRITE = {form: globals()[f"write_{form}"] for form in FORMS}
