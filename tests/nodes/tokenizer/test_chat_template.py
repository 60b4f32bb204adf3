"""Chat templates against transformers, and everything a template or a chat may do wrong."""

import json
import re
from itertools import permutations
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nodes.tokenizer.errors import ContextLengthExceeded, TemplateError, UnsupportedContent
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").iterdir()}
CHATML, QWEN_LIKE, LLAMA3_LIKE = (TEMPLATES[name] for name in ("chatml", "qwen_like", "llama3_like"))
SPECIAL_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Météo d'une ville <b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PLAIN = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hello \u00e9\u4f60\U0001f642 <|im_end|>"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye\n"},
]
WITH_TOOLS = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
    {"role": "user", "content": "Thanks"},
]
REASONED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2", "name": None},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning": "also easy"},
]


@pytest.fixture(scope="module")
def reference(make_directory):
    return AutoTokenizer.from_pretrained(make_directory("templates"))


def rendered(source, messages, tools=None, *, max_chars=100_000, special_tokens=SPECIAL_TOKENS, **options):
    kwargs = options.pop("kwargs", None)
    request = ChatRequest(
        chat=json.dumps(messages).encode(),
        tools=None if tools is None else json.dumps(tools).encode(),
        chat_template_kwargs=None if kwargs is None else json.dumps(kwargs).encode(),
        **options,
    )
    return ChatTemplate(source, special_tokens, max_chars).render(request)


LAST_WORDS = "{% set x = messages[-1].content %}{{ x }}"
"""At the end of a template that is about something else: one that does not show what users say is refused."""

CASES = [
    (PLAIN, None, {}),
    (PLAIN, None, {"add_generation_prompt": False}),
    (WITH_TOOLS, [WEATHER], {}),
    (REASONED, None, {"add_generation_prompt": False}),
    (REASONED, None, {"kwargs": {"enable_thinking": False, "date_string": "1 Jan 2030"}}),
    (PLAIN[:3], None, {"add_generation_prompt": False, "continue_final_message": True}),
    ([PLAIN[1], {"role": "assistant", "content": "Once upon a "}], None,
     {"add_generation_prompt": False, "continue_final_message": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in TEMPLATES for c in range(len(CASES)) if n != "chatml" or CASES[c][0] is not WITH_TOOLS],
)
def test_same_as_transformers(reference, name, case):
    messages, tools, options = CASES[case]
    kwargs = options.get("kwargs", {})
    expected = reference.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATES[name], tokenize=False,
        **{"add_generation_prompt": True, **{k: v for k, v in options.items() if k != "kwargs"}}, **kwargs,
    )  # fmt: skip
    assert rendered(TEMPLATES[name], messages, tools, **options) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2, sort_keys=True) }}",
        "{% for k, v in dict(a=1, b='é').items() %}{{ k }}={{ v }};{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% continue %}x{% endfor %}"
        "{{ ns.n }}",
        "  {% if true %}\n  a\n  {% endif %}\n b",
        "{{ tools }}{{ documents }}{{ missing }}{{ bos_token }}",
        "{{ strftime_now('%Y') }}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    ],
)
def test_environment_is_that_of_transformers(reference, source):
    source += LAST_WORDS
    expected = reference.apply_chat_template(PLAIN, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert rendered(source, PLAIN) == expected


def test_arguments_of_tool_calls_may_be_json_in_a_string():
    as_string = json.loads(json.dumps(WITH_TOOLS))
    as_string[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'
    assert rendered(QWEN_LIKE, as_string, [WEATHER]) == rendered(QWEN_LIKE, WITH_TOOLS, [WEATHER])


@pytest.mark.parametrize("arguments", ["not json", "[1]", '{"city":', '{"a":' * 5000])
def test_arguments_of_a_call_that_went_wrong_are_part_of_an_object(arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    said = [{"role": "assistant", "tool_calls": calls}]
    text = rendered("{{ messages[0].tool_calls | tojson }}", said)
    assert json.loads(text) == [{"function": {"name": "f", "arguments": {"arguments": arguments}}}]
    as_text = "{{ m.content }}{% if m.tool_calls %}{{ '' + m.tool_calls[0].function.arguments }}{% endif %}"
    assert json.loads(rendered("{% for m in messages %}" + as_text + "{% endfor %}", said)) == {"arguments": arguments}


def test_calls_that_are_none_are_left_as_they_are():
    calls = [{"function": {"name": "f", "arguments": 7}}, {"function": None}, "odd"]
    text = rendered("{{ messages[0].tool_calls | tojson }}", [{"role": "assistant", "tool_calls": calls}])
    assert json.loads(text) == calls


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb\nc"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
def test_parts_that_are_not_text_are_refused(kind):
    with pytest.raises(UnsupportedContent, match=r"messages\[0\].content\[0\]") as caught:
        rendered(CHATML, [{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert (caught.value.code, caught.value.param) == ("unsupported_content", "messages")


@pytest.mark.parametrize(
    "messages",
    [
        [], {}, "text", ["text"], [{}], [{"role": 1}], [{"role": "user", "content": 1}],
        [{"role": "user", "content": [1]}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"text": "a"}]}], [{"role": "user"}],
    ],
)  # fmt: skip
def test_bad_messages_are_the_requests_error(messages):
    with pytest.raises(TemplateError) as caught:
        rendered(CHATML, messages)
    assert (caught.value.code, caught.value.param) == ("template_error", "messages")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("chat", b"{", "messages"),
        ("chat", b"[" * 5000 + b"]" * 5000, "messages"),
        ("chat", b'[{"role": "user", "content": "\xff"}]', "messages"),
        ("tools", b"{}", "tools"),
        ("tools", b"nope", "tools"),
        ("chat_template_kwargs", b"[1]", "chat_template_kwargs"),
        ("chat_template_kwargs", b'{"messages": []}', "chat_template_kwargs"),
    ],
)
def test_bad_documents_name_their_field(field, value, param):
    fields = {"chat": b'[{"role": "user", "content": "a"}]', field: value}
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(CHATML, {}, 1000).render(ChatRequest(**fields))
    assert caught.value.param == param


def test_empty_documents_are_none():
    request = ChatRequest(chat=b'[{"role": "user", "content": "a"}]', tools=b"[]", chat_template_kwargs=b"null")
    assert ChatTemplate("{{ tools is none }}" + LAST_WORDS, {}, 1000).render(request) == "Truea"
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": "a"}], tools=None) == "a"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ self._TemplateReference__context }}{{ cycler.__init__.__globals__ }}",
        "{{ range(10000000) | list }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns['_x'] = 1 %}{% set ns._y = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content | nosuchfilter }}",
        "{% if %}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_that_fails_is_a_template_error(source):
    with pytest.raises(TemplateError) as caught:
        rendered(source, PLAIN)
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 700


def test_what_the_template_says_reaches_the_client():
    calls = WITH_TOOLS[1]["tool_calls"] * 2
    with pytest.raises(TemplateError, match=r"^The chat does not fit the model's template: .*single tool-calls"):
        rendered(LLAMA3_LIKE, [WITH_TOOLS[0], {"role": "assistant", "tool_calls": calls}])


def test_output_is_bounded():
    with pytest.raises(ContextLengthExceeded):
        rendered("{% for i in range(9999) %}{{ 'x' * 100 }}{% endfor %}" + LAST_WORDS, PLAIN, max_chars=5000)


def test_continuing_wins_over_a_generation_prompt():
    assert rendered(CHATML, PLAIN[:3], continue_final_message=True).endswith("Hi.")


@pytest.mark.parametrize(
    ("source", "content"),
    [
        (CHATML, None),
        ("{% for value in messages[0].values() %}{{ value }}{% endfor %}", "Hi"),
        ("{{ messages[0].content }}", "a"),
    ],
)
def test_nothing_to_continue(source, content):
    with pytest.raises(TemplateError, match="continue_final_message"):
        rendered(source, [PLAIN[0], {"role": "assistant", "content": content}], continue_final_message=True)


KNOWS_THREE = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }};{% elif m.role == 'user' %}U:{{ m.content }};"
    "{% elif m.role == 'assistant' %}A:{{ m.content }};{% endif %}{% endfor %}"
)


def test_a_role_that_the_template_leaves_out_is_refused_by_name():
    with pytest.raises(TemplateError, match="does not know the role 'critic'") as caught:
        rendered(KNOWS_THREE, [*PLAIN, {"role": "critic", "content": "Too long."}])
    assert (caught.value.code, caught.value.param) == ("template_error", "messages")
    with pytest.raises(TemplateError, match="'tool'"):
        rendered(KNOWS_THREE, [*PLAIN, {"role": "tool", "content": "12"}])
    assert rendered(KNOWS_THREE, [*PLAIN[1:2], {"role": "critic", "content": " "}]).startswith("U:"), "nothing is lost"


def test_a_role_that_is_left_out_but_would_fail_as_a_users_is_refused():
    alternating = "{% for m in messages %}{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    alternating += "{{ raise_exception('alternate!') }}{% endif %}{% endfor %}" + KNOWS_THREE
    with pytest.raises(TemplateError, match="does not know the role 'critic'"):
        rendered(alternating, [PLAIN[1], {"role": "critic", "content": "Too long."}])


def test_a_role_that_makes_the_template_fail_is_named():
    strict = "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}"
    with pytest.raises(TemplateError, match=r"no such role .*'critic'"):
        rendered(strict + "{% endif %}{{ m.content }}{% endfor %}", [*PLAIN[1:], {"role": "critic", "content": "x"}])


def test_a_template_that_shows_any_role_or_only_the_last_message_takes_any():
    odd = [{"role": "critic", "content": "Too long."}, *PLAIN]
    assert "<|im_start|>critic\nToo long.<|im_end|>" in rendered(CHATML, odd)
    assert rendered("{{ messages[-1]['content'] }}", odd) == PLAIN[-1]["content"]
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    assert rendered(shouting, odd).startswith("TOO LONG.")


def test_what_is_remembered_of_roles_is_bounded():
    template = ChatTemplate(CHATML, SPECIAL_TOKENS, 100_000)
    for number in range(200):
        chat = json.dumps([{"role": f"role-{number}", "content": "x"}]).encode()
        assert f"role-{number}" in template.render(ChatRequest(chat=chat))
    assert len(template._shown_roles) == 64


def test_developer_is_system_where_the_template_does_not_know_it():
    messages = [{"role": "developer", "content": "Be brief."}, *PLAIN[1:]]
    as_system = [{"role": "system", "content": "Be brief."}, *PLAIN[1:]]
    for source in (CHATML, QWEN_LIKE, LLAMA3_LIKE, KNOWS_THREE):
        assert rendered(source, messages) == rendered(source, as_system)
    knows = KNOWS_THREE.replace("'system' %}S", "'developer' %}D")
    assert rendered(knows, messages).startswith("D:Be brief.;")


def test_an_assistant_without_content_has_its_refusal_or_nothing_to_say():
    refusing = [*PLAIN[1:2], {"role": "assistant", "content": None, "refusal": "I will not."}]
    assert "<|im_start|>assistant\nI will not.<|im_end|>" in rendered(CHATML, refusing)
    assert "<|im_start|>assistant\n<|im_end|>" in rendered(CHATML, WITH_TOOLS)
    calls = "{% if messages[1].content is none %}{{ messages[1].tool_calls | tojson }}{% endif %}" + LAST_WORDS
    assert "get_weather" in rendered(calls, WITH_TOOLS), "templates that test for null get it"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_an_answer_that_was_broken_off_in_its_reasoning_says_nothing(name):
    broken_off = [*PLAIN[1:2], {"role": "assistant", "content": None, name: "hm"}, PLAIN[1]]
    assert "<|im_start|>assistant\n<|im_end|>" in rendered(CHATML, broken_off)
    shown = "{{ messages[1].content | tojson }}{{ messages[1].reasoning_content }}" + LAST_WORDS
    assert rendered(shown, broken_off).startswith('""hm')


def test_a_function_call_of_old_clients_is_a_tool_call():
    message = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    shown = json.loads(rendered("{{ messages[0] | tojson }}", [message]))
    call = {"id": "function0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert shown["tool_calls"] == [call]
    assert "function_call" not in shown


def calls_and(*results, ids="abc"):
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": {}}} for one in ids]
    said = [{"role": "tool", "tool_call_id": one, "content": f"result {number}"} for number, one in enumerate(results)]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *said]


@pytest.mark.parametrize("source", [QWEN_LIKE, CHATML])
def test_results_are_shown_in_the_order_of_their_calls(source):
    question = {"role": "user", "content": "?"}

    def shown(*turns):
        return re.findall(r"result \d", rendered(source, [question, *turns, question]))

    for order in permutations("abc"):
        places = [f"result {order.index(one)}" for one in "abc"]
        assert shown(*calls_and(*order)) == places
        assert shown(*calls_and(*order), question, *calls_and(*order)) == 2 * places, "each after its own calls"
    assert shown(*calls_and("c", "a")) == ["result 1", "result 0"], "one of three is missing"
    assert shown(*calls_and("b", "a", "b", ids="bba")) == ["result 0", "result 2", "result 1"], "two calls of one id"
    assert shown(*calls_and("a", "b", ids="")) == ["result 0", "result 1"], "results of calls that are elsewhere"


def test_results_after_calls_that_are_none_stay_where_they_are():
    odd = {"role": "assistant", "content": "x", "tool_calls": ["odd", {"id": None}]}
    shown = rendered("{{ messages | map(attribute='content') | join(',') }}", [odd, *calls_and("b", "a")[1:]])
    assert shown == "x,result 0,result 1"


def test_which_variables_of_requests_a_template_reads():
    def reads(source):
        return ChatTemplate(source + LAST_WORDS, SPECIAL_TOKENS, 100_000).dialect.reads

    assert (
        reads("") == reads("documents and verbosity {# documents #}{{ 'verbosity' }}{{ messages[0].documents }}") == ()
    )
    assert reads("{% set documents = [] %}{{ documents }}") == ()
    assert reads("{% for one in documents %}{{ one.text }}{% endfor %}") == ("documents",)
    assert reads("{% if documents is defined %}D{% endif %}{{ verbosity or 'medium' }}") == ("documents", "verbosity")
