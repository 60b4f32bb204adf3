"""Chat templates as published: which parser each one has, and that this parser reads the call that it renders.

`TEST_TEMPLATES` names a folder of `NAME.jinja`, such as vendor/llama.cpp/models/templates of llama-cpp-python's source.
"""

import json
import os
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nodes.gateway.parsers import make_parser, offered_tools, parser_of_template
from tests.nodes.gateway.parsers.whole import whole_answer

pytestmark = pytest.mark.real_models

PUBLISHED = {
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "deepseek_v3"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "GLM-4.6": (None, "qwen3"),
    "MiniMax-M3": (None, None),
    "google-gemma-2-2b-it": (None, None),
}
# R1's templates put reasoning that is not over before every answer, and render no call after it.
UNRENDERED = ("llama-cpp-deepseek-r1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
ARGUMENTS = {"n": 1, "s": 'a "q"\n}<'}
PROPERTIES = {"n": {"type": "integer", "description": "a number"}, "s": {"type": "string", "description": "a text"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Gets it.", "parameters": PARAMETERS}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}


def published(name):
    folder = os.environ.get("TEST_TEMPLATES")
    if not folder or not (file := Path(folder, f"{name}.jinja")).exists():
        pytest.skip("TEST_TEMPLATES names no folder with this template")
    return file.read_text()


def refuse(message):
    raise ValueError(message)


def render(template, messages, **names):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals.update(raise_exception=refuse, strftime_now=lambda _: "2026")
    return environment.from_string(template).render(messages=messages, tools=TOOLS, bos_token="", eos_token="", **names)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_marks_of_a_template_say_which_parser_it_is(name):
    assert parser_of_template(published(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name, (calls, _) in PUBLISHED.items() if calls and name not in UNRENDERED])
def test_the_call_that_a_template_renders_is_read(name):
    template = published(name)
    user = {"role": "user", "content": "hi"}
    prompt = render(template, [user], add_generation_prompt=True)
    whole = render(template, [user, {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    same = [a == b for a, b in zip(prompt, whole, strict=False)]
    begins = prompt[: same.index(False) if False in same else len(same)]
    parser = make_parser(parser_of_template(template), begins, offered_tools(TOOLS))
    answer = whole_answer(parser.feed(whole.removeprefix(begins)) + parser.close())
    [(called, arguments)] = answer.calls
    assert (called, json.loads(arguments)) == ("get", ARGUMENTS)
    assert "{" not in answer.text
