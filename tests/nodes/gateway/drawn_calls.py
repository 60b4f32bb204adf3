"""What the tests of calls by a grammar share: chats with tools, the forms of calls, and answers drawn at random."""

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mesh.actor import Answer
from mesh.address import Address
from nodes.asks.grammar import Grammar
from nodes.asks.grammar_text import grammar_of, limits
from nodes.gateway.asked.answer_form import AnswerForm, form_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.jobs.constraints import after_reasoning
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.parsers import CALLS, ParserNames, marks_of
from nodes.protocol import TemplateIs
from tests.nodes.asks.grammars import SPEC
from tests.nodes.asks.grammars import tokenizer as tiny_tokenizer
from tests.nodes.gateway.parsers.whole import Answer as ReadAnswer
from tests.nodes.gateway.parsers.whole import Call, read_whole

FORMS = (*CALLS, "mistral named")
MARKS = sorted({mark for name in CALLS for mark in marks_of(ParserNames(name))} | {"<think>", "</think>"})
TAILS = {"openai": "<|start|>assistant"}
VALIDATOR = Validator(GatewayConfig(model_name="m", context_length=1000))
_MOST_DRAWS = 4000
_LINE_END = "\n</parameter>\n"
_LURES = (*MARKS, "</parameter>", "<parameter=a>", "</function>", "```", "\\n", '\\"', "{", "}", "]", "; ", ", ")
"""What a text may hold and a parser may take for the end of something."""


class Tokens(NamedTuple):
    """A tokenizer, as the library of grammars knows it too, and which of its tokens end or fill a text."""

    made: Any
    read: LLTokenizer
    letter: int
    ends: tuple[tuple[int, ...], ...]
    text_ends: tuple[tuple[int, ...], ...]
    lures: tuple[tuple[int, ...], ...]

    def text_of(self, output: list[int]) -> str:
        return self.made.decode(output, skip_special_tokens=False)


@cache
def tokens(*, has_tokens: bool) -> Tokens:
    """The bundled model's, with all marks as tokens of their own or as letters like others."""
    document = json.loads(tiny_tokenizer().to_str())
    # It has two marks of its own.
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in MARKS]
    made = type(tiny_tokenizer()).from_str(json.dumps(document))
    if has_tokens:
        made.add_special_tokens(MARKS)
    read = LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=list(SPEC.eos_token_ids))

    def ids(text: str) -> tuple[int, ...]:
        # By letters, since marks in a text are letters.
        return tuple(token_id for letter in text for token_id in made.encode(letter, add_special_tokens=False).ids)

    [letter] = ids("z")
    ends = (*((one,) for one in SPEC.eos_token_ids), ids("}"), ids("]"), ids(_LINE_END))
    return Tokens(made, read, letter, ends, (ids(_LINE_END), ids('"')), tuple(map(ids, _LURES)))


def form(name: str, reasoning: str = "none", *, has_tokens: bool = False) -> AnswerForm:
    calls, _, named = name.partition(" ")
    config = GatewayConfig(model_name="m", context_length=9, tool_call_parser=calls, reasoning_parser=reasoning)
    made = tokens(has_tokens=has_tokens).made
    ids = {mark: token_id for mark in MARKS if (token_id := made.token_to_id(mark)) is not None}
    said = TemplateIs(template="[ARGS]" if named else "", added_ids=ids, shows_tools=True)
    return form_of(Answer(said, (), Address("tok", 1)), config)


def chat_with(tools: Any, **fields: Any) -> Job:
    """A chat that offers these functions."""
    tools = [{"type": "function", "function": tool} for tool in tools]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    return VALIDATOR.chat(json.dumps(body).encode(), "chatcmpl-1")


def drawn(job: Job, of: AnswerForm, seed: int, tail: str) -> tuple[str, bool]:
    """Text of random tokens of those allowed, more and more of which end something; and whether it came to an end."""
    by, matcher = _matcher(job, of, tail)
    assert not matcher.is_error(), matcher.get_error()
    dice, output = random.Random(seed), list[int]()
    for num_draws in range(_MOST_DRAWS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        among = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        assert len(among), matcher.get_error()
        for draw in _offers(by, dice, among, num_draws):
            if len(draw) == 1 and draw[0] in SPEC.eos_token_ids and draw[0] in among:
                return by.text_of(output), True
            if matcher.validate_tokens(list(draw)) == len(draw):
                assert matcher.consume_tokens(list(draw))
                output += draw
                break
    return by.text_of(output), False


def _offers(by: Tokens, dice: random.Random, among: Any, num_draws: int) -> Iterator[tuple[int, ...]]:
    """Draws to be tried one after the other, the last of which is allowed."""
    is_text = by.letter in among
    if dice.random() < (0.5 if num_draws < 100 else 0.95):
        yield from by.text_ends if is_text else by.ends
    elif is_text and dice.random() < 0.2:
        yield dice.choice(by.lures)
    yield (int(dice.choice(among)),)


def _matcher(job: Job, of: AnswerForm, tail: str) -> tuple[Tokens, LLMatcher]:
    by = tokens(has_tokens=len(of.mark_ids) == len(marks_of(of.names)))
    grammar = next(ask for ask in after_reasoning(job, of, tail).asks if isinstance(ask, Grammar))
    document = grammar_of(grammar.kind, grammar.text, lambda _: False, after=grammar.after)
    return by, LLMatcher(by.read, document, limits=limits(), log_level=0)


def accepts(text: str, job: Job, of: AnswerForm, tail: str = "") -> bool:
    """Whether an answer may be this text."""
    by, matcher = _matcher(job, of, tail)
    ids = by.made.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def read(text: str, job: Job, of: AnswerForm, tail: str) -> ReadAnswer:
    return read_whole(Answers(of, job.answer, tail, ["r-0"]), text)


def check_calls(calls: Sequence[Call], tools: Any) -> list[str]:
    """The names of the calls, all of which are valid."""
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    for call in calls:
        jsonschema.Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))
    return [call.name for call in calls]


def written(of: AnswerForm, *calls: tuple[str, Any]) -> str:
    """Calls as the form says."""
    form = of.call_form
    assert form is not None

    def said(name: str, arguments: Any) -> str:
        if not form.as_lines:
            return form.head.replace("NAME", name) + json.dumps(arguments, ensure_ascii=False) + form.tail
        values = {
            key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for key, one in arguments.items()
        }
        lines = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in values.items())
        return form.head.replace("NAME", name) + lines + form.tail

    return form.opening + form.between.join(said(*call) for call in calls) + form.closing
