"""Parsers of what a model writes: text in, events out (`events.py`); pure, one parser for each sample.

`make_parser` takes the names, from a model's flags or by `parser_of_template`, the end of the rendered prompt and the
tools offered. A form of calls is one file and one line here, as is a form of reasoning; other packages install theirs
(`plugins.py`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nodes.gateway.parsers.answer import AnswerParser
from nodes.gateway.parsers.calls import Calls, OfferedTools
from nodes.gateway.parsers.deepseek import DeepSeekV3Calls, DeepSeekV31Calls
from nodes.gateway.parsers.harmony import HarmonyParser
from nodes.gateway.parsers.hermes import HermesCalls
from nodes.gateway.parsers.llama3_json import Llama3JsonCalls
from nodes.gateway.parsers.mistral import MistralCalls
from nodes.gateway.parsers.plugins import ParserUnusable, installed_parsers, load_maker, make_installed
from nodes.gateway.parsers.qwen3_coder import Qwen3CoderCalls
from nodes.gateway.parsers.stage import Parser
from nodes.gateway.parsers.templates import ParserNames, parser_of_template
from nodes.gateway.parsers.thinking import (
    DeepSeekR1Thinking,
    DeepSeekV3Thinking,
    MistralThinking,
    Qwen3Thinking,
    Thinking,
)

HARMONY: Final = "openai"
NO_PARSER: Final = "none"
"""As a flag: nothing is looked for, whatever the template says."""
CALLS: Final[dict[str, type[Calls]]] = {
    "hermes": HermesCalls,
    "qwen3_coder": Qwen3CoderCalls,
    "llama3_json": Llama3JsonCalls,
    "mistral": MistralCalls,
    "deepseek_v3": DeepSeekV3Calls,
    "deepseek_v31": DeepSeekV31Calls,
    HARMONY: HarmonyParser,
}
REASONING: Final[dict[str, type[Thinking] | type[HarmonyParser]]] = {
    "qwen3": Qwen3Thinking,
    "deepseek_r1": DeepSeekR1Thinking,
    "deepseek_v3": DeepSeekV3Thinking,
    "mistral": MistralThinking,
    "openai_gptoss": HarmonyParser,
}


def make_parser(names: ParserNames, prompt_tail: str, tools: OfferedTools) -> AnswerParser:
    """A parser for one sample. With no tools, what looks like a call is text. Raises ParserUnusable."""
    if names.calls == HARMONY:
        return AnswerParser(None, HarmonyParser(tools, prompt_tail))
    if names.calls in CALLS or names.calls is None:
        calls = CALLS[names.calls](tools) if names.calls and tools else None
    else:
        calls = make_installed(names.calls, tools, prompt_tail)
    return AnswerParser(reasoning_parser(names, prompt_tail), calls)


def reasoning_parser(names: ParserNames, prompt_tail: str) -> Parser | None:
    """What reads the reasoning of one sample; None: nothing. Raises ParserUnusable."""
    name = names.reasoning
    if name is None:
        return None
    if name not in REASONING:
        return make_installed(name, {}, prompt_tail)
    made = REASONING[name]
    return made({}, prompt_tail) if issubclass(made, HarmonyParser) else made(prompt_tail)


def check_names(calls: str, reasoning: str) -> None:
    """Raise ParserUnusable for the name of a parser that is not there; empty ones and `none` name none."""
    others = installed_parsers()
    for flag, name, table in (("tool-call", calls, CALLS), ("reasoning", reasoning, REASONING)):
        if name not in ("", NO_PARSER, *table, *others):
            known = ", ".join([*table, *others, NO_PARSER])
            raise ParserUnusable(f"there is no {flag} parser {name!r}; there are {known}")


def marks_of(names: ParserNames) -> tuple[str, ...]:
    """The marks that must reach the parsers, even where a tokenizer calls them special. Raises ParserUnusable."""
    tables: tuple[tuple[str | None, Mapping[str, Any]], ...] = ((names.calls, CALLS), (names.reasoning, REASONING))
    marks: dict[str, None] = {}
    for name, table in tables:
        if name is not None:
            source: Any = table[name] if name in table else load_maker(name)
            marks.update(dict.fromkeys(getattr(source, "marks", ())))
    return tuple(marks)


def offered_tools(tools: Iterable[Mapping[str, Any]]) -> OfferedTools:
    """Functions of the API's `tools`, as chats or responses name them; of those with one name the first."""
    offered: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if "name" in function:
            offered.setdefault(function["name"], function.get("parameters") or {})
    return offered


__all__ = [
    "CALLS", "HARMONY", "NO_PARSER", "REASONING", "AnswerParser", "OfferedTools", "Parser", "ParserNames",
    "ParserUnusable", "check_names", "installed_parsers", "make_parser", "marks_of", "offered_tools",
    "parser_of_template", "reasoning_parser",
]  # fmt: skip
