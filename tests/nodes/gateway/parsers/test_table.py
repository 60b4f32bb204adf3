"""Which parser a model has, what its marks are, ids of calls, and parsers of other packages."""

import re

import pytest

from nodes.gateway.parsers import (
    CALLS,
    REASONING,
    ParserNames,
    ParserUnusable,
    installed_parsers,
    make_parser,
    marks_of,
    offered_tools,
    parser_of_template,
)
from nodes.gateway.parsers.call_ids import call_id
from nodes.gateway.parsers.events import END, Text
from nodes.gateway.parsers.plugins import load_maker

SMALL = {
    r"{{ '\n<tool_call>\n{\"name\": \"' + call.name }}</think>": ("hermes", "qwen3"),
    r"{{ '<tool_call>\n<function=' + call.name + '>\n<parameter=' }}": ("qwen3_coder", None),
    "<tool_call>{function-name}\n<arg_key>": (None, None),
    "<|start_header_id|> {\"name\": function name, \"parameters\": {}}": ("llama3_json", None),
    "[TOOL_CALLS][THINK]": ("mistral", "mistral"),
    "<｜Assistant｜><｜tool▁calls▁begin｜>```json</think>": ("deepseek_v3", "deepseek_r1"),
    "<｜Assistant｜><｜tool▁calls▁begin｜></think>": ("deepseek_v31", "deepseek_v3"),
    "<|start|>assistant<|channel|>": ("openai", "openai_gptoss"),
    "<|im_start|>": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("template", SMALL)
def test_marks_of_a_template_say_which_parser_it_is(template):
    assert parser_of_template(template) == SMALL[template]


def test_every_parser_names_its_marks():
    for name in CALLS:
        assert marks_of(ParserNames(name)) == CALLS[name].marks
    for name in REASONING:
        assert marks_of(ParserNames(None, name))
    assert marks_of(ParserNames("hermes", "qwen3")) == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert marks_of(ParserNames()) == ()


def test_what_begins_a_call_is_a_mark():
    for calls in CALLS.values():
        for form in (calls.form, calls.form_in("[ARGS]")):
            assert not calls.begin or calls.begin in calls.marks
            assert (form.opening + form.head).startswith(calls.begin)


def test_ids_are_the_same_again_and_of_the_form_asked_for():
    assert call_id("r1", 0) == call_id("r1", 0)
    assert len({call_id(request, index) for request in ("r1", "r2") for index in range(128)}) == 256
    assert re.fullmatch("call_[0-9a-f]{24}", call_id("r1", 3))
    assert re.fullmatch("[0-9A-Za-z]{9}", call_id("r1", 3, short=True))
    assert [name for name, form in CALLS.items() if form.short_ids] == ["mistral"]


def test_tools_are_read_as_chats_and_responses_name_them_and_the_first_of_a_name_counts():
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
        {"type": "function", "name": "b"},
        {"type": "web_search"},
        {"type": "function", "function": {"name": "a"}},
    ]
    assert offered_tools(tools) == {"a": {"type": "object"}, "b": {}}


MODULE = """
class Shout:
    marks = ("<!>",)
    def __init__(self, tools, prompt_tail):
        if prompt_tail == "fail":
            raise RuntimeError("no")
        self.text = prompt_tail
    def feed(self, text):
        from nodes.gateway.parsers.events import Text
        return [Text(text.upper())]
    def close(self):
        return []
def nothing(tools, prompt_tail):
    return 7
number = 7
"""
POINTS = """[kvmesh.parsers]
shout = a_parser:Shout
nothing = a_parser:nothing
number = a_parser:number
missing = not_there:at_all
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / "a_parser.py").write_text(MODULE)
    about = tmp_path / "a_parser-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a_parser\nVersion: 1\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_maker.cache_clear()
    yield
    load_maker.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_parser_of_another_package_reads_calls_or_reasoning():
    assert "shout" in installed_parsers()
    for names in (ParserNames("shout"), ParserNames(None, "shout"), ParserNames("shout", "qwen3")):
        parser = make_parser(names, "", {"get": {}})
        assert [*parser.feed("hey"), *parser.close()] == [Text("HEY"), END]
        assert "<!>" in marks_of(names)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "tail", "why"),
    [("shout", "fail", "RuntimeError: no"), ("nothing", "", "int"), ("number", "", "not callable"),
     ("missing", "", "not_there"), ("unheard", "", "shout")],
)  # fmt: skip
def test_a_parser_that_cannot_be_had_says_why(name, tail, why):
    with pytest.raises(ParserUnusable, match=why):
        make_parser(ParserNames(name), tail, {"get": {}})
