"""Calls and reasoning in the tokens of published models: shown though special tokens are skipped, read back, enforced.

Templates are those of the folder `TEST_TEMPLATES`, as in `tests/nodes/gateway/parsers/test_published_templates.py`.
"""

import json
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher, LLTokenizer

from mesh.actor import Answer
from mesh.address import Address
from nodes.asks.grammar import Grammar
from nodes.asks.grammar_text import grammar_of, limits
from nodes.detokenizer.incremental import DecoderFactory
from nodes.gateway.asked.answer_form import AnswerForm, form_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.jobs.constraints import after_reasoning, with_calls
from nodes.gateway.jobs.validation import Validator
from nodes.model_spec.token_bytes import added_ids
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.protocol import PROMPT_TAIL_CHARS, TemplateIs
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate
from tests.nodes.gateway.parsers.test_published_templates import published
from tests.nodes.gateway.parsers.whole import Answer as ReadAnswer
from tests.nodes.gateway.parsers.whole import read_whole
from tests.real_models.folders import folder_of, spec_of

pytestmark = [pytest.mark.real_models, pytest.mark.timeout(300)]

CONFIG = GatewayConfig(model_name="m", context_length=10_000)
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": PARAMETERS}}]
USER = {"role": "user", "content": "Get it."}
ARGUMENTS = {"n": 1, "s": 'a "q"\n}<'}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": json.dumps(ARGUMENTS)}}
MODELS = {
    "qwen3": "Qwen-Qwen3-0.6B",
    "llama3_1": "meta-llama-Llama-3.1-8B-Instruct",
    "mistral_nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "gptoss": "openai-gpt-oss-120b",
    "deepseek_v3": "deepseek-ai-DeepSeek-V3.1",
}


class Published(NamedTuple):
    """A model's tokenizer and template, and what a gateway makes of them."""

    tokenizer: Any
    template: ChatTemplate
    form: AnswerForm

    def prompt(self, *messages: Any) -> str:
        shown = json.dumps(TOOLS).encode() if self.template.dialect.shows_tools else None
        chat = json.dumps([USER, *messages]).encode()
        return self.template.render(ChatRequest(chat=chat, tools=shown, add_generation_prompt=not messages))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def read(self, ids: list[int], tail: str) -> ReadAnswer:
        """As detokenizer and gateway do, token by token."""
        decoder = DecoderFactory(self.tokenizer).decoder(True, shown_ids=self.form.shown_ids)
        job = Validator(CONFIG).chat(json.dumps({"messages": [USER], "tools": TOOLS}).encode(), "r")
        answers = Answers(self.form, job.answer, tail, ["r-0"])
        return read_whole(answers, "".join(map(decoder.push, ids)) + decoder.flush())


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    source = published(MODELS[request.param])
    spec = spec_of(folder_of(f"tokenizers/{request.param}"), tmp_path_factory.mktemp(request.param))
    tokenizer = load_tokenizer(spec)
    template = ChatTemplate(source, spec.special_tokens, 100_000)
    said = TemplateIs(template=source, added_ids=added_ids(tokenizer), shows_tools=template.dialect.shows_tools)
    return Published(tokenizer, template, form_of(Answer(said, (), Address("tok", 1)), CONFIG))


def test_a_call_that_the_template_renders_is_read_back(model: Published) -> None:
    begins = model.prompt()
    whole = model.prompt({"role": "assistant", "content": None, "tool_calls": [CALL]})
    # A prompt may open or close reasoning, of which nothing is left in a history.
    mark = next((one for one in ("<think>", "</think>") if one in begins), "")
    begins = begins if whole.startswith(begins) or not mark else begins[: begins.rindex(mark)]
    answer = model.read(model.ids(whole.removeprefix(begins)), begins[-PROMPT_TAIL_CHARS:])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("get", ARGUMENTS)]


def test_a_required_call_is_allowed_in_the_tokens_of_the_model_and_nothing_else(model: Published) -> None:
    form = model.form
    assert form.call_form is not None
    job = Validator(CONFIG).chat(
        json.dumps({"messages": [USER], "tools": TOOLS, "tool_choice": "required"}).encode(), "r"
    )
    tail = model.prompt()[-PROMPT_TAIL_CHARS:]
    grammar = next(ask for ask in after_reasoning(with_calls(job, form), form, tail).asks if isinstance(ask, Grammar))
    document = grammar_of(grammar.kind, grammar.text, lambda _: False, after=grammar.after)
    written = form.call_form
    text = written.opening + written.head.replace("NAME", "get") + '{"n": 1}' + written.tail + written.closing
    if tail.rstrip().endswith("<think>"):
        text = "Hm.\n</think>\n\n" + text
    reader = LLTokenizer(model.tokenizer.to_str())
    matcher = LLMatcher(reader, document, limits=limits(), log_level=0)
    ids = model.ids(text)
    assert matcher.try_consume_tokens(ids) == len(ids), text
    assert matcher.is_accepting()
    assert [call.arguments for call in model.read(ids, tail).calls] == ['{"n": 1}']
    if not tail.rstrip().endswith("<think>"):
        matcher = LLMatcher(reader, document, limits=limits(), log_level=0)
        assert matcher.try_consume_tokens(model.ids("Certainly, ")) == 0
