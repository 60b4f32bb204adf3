"""Adds to a job what its tools ask of its draws: calls in the model's own form where one is required or strict.

Twice: before a tokenizer is asked, which tries the grammar out, and when it has told how the prompt ends, since a
grammar begins after reasoning. Pure.
"""

import json
from collections.abc import Sequence

from msgspec.structs import replace

from nodes.asks.grammar import Grammar
from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.errors import BadRequest, unsupported
from nodes.gateway.fields.tool_fields import OfferedTool
from nodes.gateway.jobs.answer_grammar import CallGrammar, Unwritable, arguments_schema, before_answer, json_term
from nodes.gateway.jobs.validation import Job, with_asks
from nodes.gateway.parsers import CALLS, HARMONY, reasoning_parser
from nodes.gateway.parsers.harmony import HarmonyParser
from nodes.gateway.parsers.thinking import Thinking


def with_calls(job: Job, form: AnswerForm) -> Job:
    """The job with a grammar of calls, if its answer has to keep to one. Raises BadRequest naming the field."""
    use = job.tools
    content = next((ask for ask in job.asks if isinstance(ask, Grammar)), None)
    is_bound = use.must_call or use.is_narrowed or any(tool.strict for tool in use.offered)
    if not use.offered or not (is_bound or content):
        return job
    calls = _grammar_of(job, form)
    said = "" if content is None or use.must_call else _term_of(content, use.param)
    try:
        texts = [calls.lark(marks, must_call=use.must_call, content=said) for marks in (dict(form.mark_ids), {})]
        checked = _of_each(calls, [tool for tool in use.offered if use.must_call or tool.strict])
    except Unwritable as error:
        raise BadRequest(str(error), param=error.param, code="unsupported_schema") from None
    # Checked without the model's vocabulary, where marks are letters like others.
    asked, whole = (Grammar("grammar", text, use.param) for text in texts)
    others = [ask for ask in job.asks if ask is not content]
    return with_asks(job, [*others, asked], [*(ask for ask in others if ask.is_checked), *checked, whole])


def _of_each(calls: CallGrammar, tools: Sequence[OfferedTool]) -> list[Grammar]:
    """What is checked of each tool by itself: only so an error can say which one it is. Raises Unwritable."""
    checked = [Grammar("json", json.dumps(arguments_schema(tool)), tool.param, tool.strict) for tool in tools]
    if not calls.form.as_lines:
        return checked
    # JSON would leave out an optional parameter that no value fits; lines with one cannot be compiled.
    lines = [(tool.param, calls._replace(tools=[tool]).lark({}, must_call=True)) for tool in tools]
    return checked + [Grammar("grammar", text, param) for param, text in lines]


def _grammar_of(job: Job, form: AnswerForm) -> CallGrammar:
    use, name = job.tools, form.names.calls
    if name not in CALLS or form.call_form is None:
        param = "tool_choice" if use.must_call else use.param
        message = f"'{param}' asks for calls that are enforced, which the parser '{name}' of this server cannot."
        raise unsupported(message, param)
    return CallGrammar(form.call_form, CALLS[name].begin, use.offered, use.one_call, is_harmony=name == HARMONY)


def _term_of(content: Grammar, param: str) -> str:
    """Lark of what the text has to be, if it is no call."""
    if content.kind == "json":
        return json_term(content.text, strict=content.strict)
    message = f"'{content.param}' cannot be used together with '{param}': describe the answer by a JSON schema."
    raise unsupported(message, content.param)


def after_reasoning(job: Job, form: AnswerForm, prompt_tail: str) -> Job:
    """The job with grammars that begin once the reasoning is over, which the prompt may have begun."""
    grammar = next((ask for ask in job.asks if isinstance(ask, Grammar)), None)
    reasoning = None if grammar is None else reasoning_parser(form.names, prompt_tail)
    if grammar is None or not isinstance(reasoning, Thinking | HarmonyParser):
        return job
    is_called = bool(job.tools.offered)
    before = before_answer(reasoning, dict(form.mark_ids), is_called=is_called)
    return job._replace(asks=[replace(ask, after=before) if ask is grammar else ask for ask in job.asks])
