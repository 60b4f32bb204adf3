"""What is found of a template by rendering, and contents in the form that it takes: nobody's words are lost."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from nodes.tokenizer.errors import PrepareError, TemplateError
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate
from nodes.tokenizer.templates.dialect import TemplateDialect, as_content, text_of, with_mark
from nodes.tokenizer.templates.probe import MAX_RENDERINGS, probe_template
from tests.nodes.tokenizer.test_chat_template import TEMPLATES

LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
MACRO = (
    "{% macro shown(c) %}{% for p in c %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ m.role }}:{{ shown(m.content) }};{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "[{{ p.text }}]{% endfor %}{% endif %};{% endfor %}"
)
STRING = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
FIRST_PART = "{% for m in messages %}{{ m.role }}:{{ m.content[0].text }};{% endfor %}"
GEMMA_LIKE = (
    "{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
    "{{ messages[0].content[0].text }}{% endif %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% else %}{{ raise_exception('bad content') }}{% endif %};"
    "{% endfor %}"
)
PARTS = [{"type": "text", "text": "just"}, {"type": "input_text", "text": "two"}]


def dialect(source):
    return ChatTemplate(source, {}, 10_000).dialect


def rendered(source, *messages, **options):
    chat = [{"role": role, "content": content} for role, content in messages]
    return ChatTemplate(source, {}, 10_000).render(ChatRequest(chat=json.dumps(chat).encode(), **options))


@pytest.mark.parametrize("content", ["just one", [{"type": "text", "text": "just one"}]])
def test_a_template_that_reads_parts_only_loses_nothing(content):
    assert rendered(LOOP, ("user", content)) == "<|im_start|>user\njust one<|im_end|>\n"
    assert rendered(LOOP, ("user", PARTS)) == "<|im_start|>user\njusttwo<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "form", "string", "parts"),
    [
        (STRING, "string", "a", "just\ntwo"),
        (LOOP, "parts", "a", "justtwo"),
        (MACRO, "parts", "a", "justtwo"),
        (BOTH, "either", "a", "[just][two]"),
        (FIRST_PART, "part", "a", "just\ntwo"),
        (STRING.replace("m.content", "m.content | tojson"), "string", '"a"', '"just\\ntwo"'),
        (STRING.replace("m.content", "m.content | string | upper"), "string", "A", "JUST\nTWO"),
        (BOTH.replace("[{{ p.text }}]", "{{ p }}"), "string", "a", "just\ntwo"),
        (LOOP.replace("p.text", "p.text | trim | title"), "parts", "A", "JustTwo"),
        ("{{ messages[-1].content }}", "string", "a", "just\ntwo"),
    ],
)
def test_contents_take_the_form_that_shows(source, form, string, parts):
    assert dialect(source).forms["user"] == form
    assert string in rendered(source, ("user", "a"))
    assert parts in rendered(source, ("user", PARTS))
    assert text_of(as_content(["just", "two"], form)).replace("\n", "") == "justtwo"


def test_each_role_has_its_form():
    found = dialect(GEMMA_LIKE)
    assert found.forms == {"user": "either", "assistant": "either", "system": "string"}
    assert rendered(GEMMA_LIKE, ("system", PARTS), ("user", PARTS)) == "just\ntwouser:justtwo;"
    mixed = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}{% elif m.role == 'assistant' %}"
        "{{ m.content + '' }}{% else %}{% for p in m.content %}{{ '' + p.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    assert dialect(mixed).forms == {"user": "part", "assistant": "string", "system": "parts", "tool": "parts"}
    said = [(role, PARTS) for role in ("system", "user", "assistant", "critic")]
    # A role that no probe knows is written as a user's words are, and this template iterates over them.
    assert rendered(mixed, *said) == "justtwo;just\ntwo;just\ntwo;just\ntwo;"


@pytest.mark.parametrize(
    "source",
    [
        "Hello.",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{{ m.content[1:] | first }}{% endfor %}"
        .replace("{{ p }}", "{% if p is mapping %}{{ p }}{% endif %}"),
        "{% for m in messages if m.content is not string %}{{ m.content | tojson }}{% endfor %}",
        "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}",
        "{% for i in range(20000) %}{{ 'x' * 100 }}{% endfor %}{{ messages[0].content }}",
    ],
)  # fmt: skip
def test_a_template_that_loses_what_users_say_is_refused(source):
    with pytest.raises(TemplateError, match="leaves out what users say"):
        dialect(source)


def test_what_fails_in_each_chat_is_said_and_served_as_far_as_it_goes():
    strict = "{% if not documents %}{{ raise_exception('documents!') }}{% endif %}" + STRING
    assert dialect(strict).refused == dict.fromkeys(("user", "assistant", "system", "tool"), "documents!")
    with pytest.raises(TemplateError, match="documents!"):
        rendered(strict, ("user", "a"))
    assert rendered(strict, ("user", "a"), chat_template_kwargs=b'{"documents": [1]}') == "user:a;"


def test_a_role_that_is_left_out_or_refused_is_known_from_the_start():
    silent = "{% for m in messages if m.role != 'tool' %}{{ m.content }};{% endfor %}"
    assert (dialect(silent).left_out, dialect(silent).refused) == (("tool",), {})
    template = ChatTemplate(silent, {}, 10_000)
    renderings = counted(template)
    with pytest.raises(TemplateError, match="does not know the role 'tool'"):
        template.render(ChatRequest(chat=b'[{"role": "user", "content": "a"}, {"role": "tool", "content": "12"}]'))
    assert renderings == []
    template.render(ChatRequest(chat=b'[{"role": "user", "content": "a"}, {"role": "tool", "content": " "}]'))
    assert len(renderings) == 1, "nothing is lost, and nothing rendered twice"
    raising = silent.replace(
        " if m.role != 'tool' %}", " %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    )
    assert (dialect(raising).left_out, dialect(raising).refused) == ((), {"tool": "no tools"})
    with pytest.raises(TemplateError, match="no tools"):
        rendered(raising, ("user", "a"), ("tool", "12"))


@pytest.mark.parametrize(
    ("shown", "shows"),
    [
        ("{{ tools | tojson }}", True),
        ("{% for t in tools %}{{ t.function.description }}{% endfor %}", True),
        ("{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties | join }}){% endfor %}", True),
        ("{% if tools %}You have tools to count.{% endif %}", False),
    ],
)
def test_tools_show_by_their_descriptions_or_parameters(shown, shows):
    source = shown + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert dialect(source).shows_tools == shows


def counted(template):
    """Gets the messages of each rendering. By a private name: how often it renders shows nowhere else."""
    calls, generate = [], template._generate
    template._generate = lambda variables, most: calls.append(variables["messages"]) or generate(variables, most)
    return calls


def test_what_the_probes_have_shown_is_rendered_once():
    for source in (*TEMPLATES.values(), LOOP, BOTH):
        template = ChatTemplate(source, {}, 10_000)
        renderings = counted(template)
        chat = [{"role": role, "content": "Words."} for role in ("system", "user", "assistant", "user")]
        template.render(ChatRequest(chat=json.dumps(chat).encode()))
        assert len(renderings) == 1


@pytest.mark.parametrize("source", [LOOP, MACRO, FIRST_PART, BOTH])
def test_roles_that_no_probe_knows_are_checked_in_parts_too(source):
    assert "A critic" in rendered(source, ("user", PARTS), ("critic", [{"type": "text", "text": "A critic"}]))
    named = "{% if m.role in ['user', 'assistant', 'system', 'tool'] %}"
    knowing = source.replace("{% for m in messages %}", "{% for m in messages %}" + named)
    knowing = knowing.removesuffix("{% endfor %}") + "{% endif %}{% endfor %}"
    assert "just" in rendered(knowing, ("user", PARTS), ("assistant", PARTS))
    for content in ("Bad.", PARTS):
        with pytest.raises(TemplateError, match="critic"):
            rendered(knowing, ("user", PARTS), ("critic", content))


@pytest.mark.parametrize(
    ("source", "expected"),
    [(LOOP, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\njusttwo "), (STRING, "user:Q;assistant:just\ntwo "),
     (BOTH, "user:[Q];assistant:[just][two "), (FIRST_PART, "user:Q;assistant:just\ntwo "),
     (LOOP.replace("p.text", "p.text | trim"), "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\njusttwo")],
)  # fmt: skip
def test_the_last_message_is_continued_in_any_form(source, expected):
    parts = [PARTS[0], {"type": "text", "text": "two "}]
    question = [{"type": "text", "text": "Q"}]
    assert rendered(source, ("user", question), ("assistant", parts), continue_final_message=True) == expected


@pytest.mark.parametrize("source", [LOOP, BOTH])
def test_no_part_is_nothing_to_continue(source):
    with pytest.raises(TemplateError, match="no content to continue"):
        rendered(source, ("user", "Q"), ("assistant", []), continue_final_message=True)


def test_developer_is_known_if_it_is_not_treated_like_any_role():
    instructions = (
        "{% if messages[0].role in ['developer', 'system'] %}<|start|>developer# {{ messages[0].content }}<|end|>"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|start|>user{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    named = "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'developer'] %}"
    named += "{{ raise_exception('who?') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    for source, known in (
        (instructions, True), (named, True), (STRING, False), (STRING.replace("m.role", "m.role | upper"), False),
        (BOTH, False), (LOOP, False), (GEMMA_LIKE, False), ("{{ messages[-1].content }}", False),
        (named.replace(", 'developer'", ""), False), ("{# developer #}" + STRING, False),
    ):  # fmt: skip
        assert ("developer" in dialect(source).forms) == known, source
    assert rendered(instructions, ("developer", PARTS), ("user", "a")).startswith(
        "<|start|>developer# just\ntwo<|end|>"
    )
    assert rendered(STRING, ("developer", "Be brief."), ("user", "a")).startswith("system:Be brief.")
    assert rendered(named, ("developer", "Be brief."), ("user", "a")).startswith("developer:Be brief.")


CALL = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("message", "null", "text"),
    [
        ("{{ m.content }}" + CALL, False, False),
        ("{{ m.content + '' }}" + CALL, False, False),
        ("{{ m.content or '' }}" + CALL, True, False),
        ("{% if m.content is not none %}{{ m.content }}{% else %}" + CALL + "{% endif %}", True, False),
        # QwQ's fails only once the call has been answered.
        ("{% if loop.last %}{{ m.content or '' }}{% else %}{{ m.content.strip() }}{% endif %}" + CALL, False, False),
        # DeepSeek V3's does not print an object, and leaves out the call if there is a content, be it empty.
        ("{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '' }}{% else %}{{ m.content }}{% endif %}",
         True, True),
        ("{{ m.content }}", False, False),
    ],
)  # fmt: skip
def test_calls_of_tools_come_in_the_form_that_shows(message, null, text):
    source = "{% for m in messages %}{{ m.role }}:" + message + ";{% endfor %}"
    found = dialect(source)
    assert (found.has_null_content, found.has_text_arguments) == (null, text)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "this"}'}}
    chat = [{"role": "user", "content": "Do."}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = ChatTemplate(source, {}, 1000).render(ChatRequest(chat=json.dumps(chat).encode()))
    assert ("this" in shown, "None" in shown) == ("function" in message, False)


def test_the_number_of_renderings_is_bounded():
    for fails in (lambda n: True, lambda n: False, lambda n: n % 2, lambda n: n % 3, lambda n: n > 9 and n % 5):
        calls = []

        def render(messages, tools, fails=fails, calls=calls):
            calls.append(messages)
            if fails(len(calls)):
                raise TemplateError("no", "messages")
            return "7301946528" if len(calls) < 10 else ""

        with contextlib.suppress(TemplateError):
            probe_template(render)
        assert 0 < len(calls) <= MAX_RENDERINGS


def test_a_template_that_takes_all_memory_is_not_tried_again():
    def render(messages, tools):
        calls.append(messages)
        raise TemplateError("no memory", "messages") from MemoryError()

    calls = []
    with pytest.raises(TemplateError, match="takes all memory"):
        probe_template(render)
    assert len(calls) == 1


def test_marks_and_texts_of_contents():
    assert with_mark("a", "!") == "a!"
    assert with_mark([], "!") == []
    assert text_of(with_mark(as_content(["a", "b"], "parts"), "!")) == "ab!"
    assert text_of(None) == ""
    assert TemplateDialect(forms={}).form("user") == "string"


WAYS = {
    "string": "{{ C }}",
    "loop": "{% for p in C %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "both": "{% if C is string %}{{ C }}{% else %}{% for p in C %}{{ p['text'] }}{% endfor %}{% endif %}",
    "first": "{{ C[0].text if C is not string else C }}",
    "printed": "{{ C | tojson }}",
}


@st.composite
def templates(draw):
    """A template, and whether it shows the words of a role."""
    ways = {role: draw(st.sampled_from(sorted(WAYS))) for role in ("user", "assistant", "system")}
    left_out = draw(st.sampled_from(["", "", "assistant", "system"]))
    macro, trim = draw(st.booleans()), draw(st.booleans())
    head, body = "", ""
    for role, way in ways.items():
        shown = WAYS[way].replace("{{ p.text }}", "{{ p.text | trim }}") if trim else WAYS[way]
        if macro:
            head += f"{{% macro {role}(c) %}}{shown.replace('C', 'c')}{{% endmacro %}}"
            shown = f"{{{{ {role}(m.content) }}}}"
        if role != left_out:
            body += f"{{% if m.role == '{role}' %}}<{role}>{shown.replace('C', 'm.content')}{{% endif %}}"
    return SimpleNamespace(
        source=f"{head}{{% for m in messages %}}{body}\n{{% endfor %}}", ways=ways, left_out=left_out
    )


words = st.text("aBz05é你🙂<{%", min_size=1, max_size=9)
contents = words | st.lists(words, min_size=1, max_size=3)


@given(templates(), st.lists(contents, min_size=3, max_size=3))
@example(
    SimpleNamespace(source=LOOP, ways=dict.fromkeys(("user", "assistant", "system"), "loop"), left_out=""), ["a"] * 3
)
def test_words_are_never_lost_and_what_transformers_shows_as_sent_is_the_same(template, said):
    roles = ("system", "user", "assistant")
    sent = [
        {"role": role, "content": words if isinstance(words, str) else [{"type": "text", "text": one} for one in words]}
        for role, words in zip(roles, said, strict=True)
    ]
    compiled = ChatTemplate(template.source, {}, 10_000)
    if template.left_out:
        assert template.left_out in compiled.dialect.left_out
        sent = [one for one in sent if one["role"] != template.left_out]
    text = compiled.render(ChatRequest(chat=json.dumps(sent).encode(), add_generation_prompt=False))
    for role, words in zip(roles, said, strict=True):
        if role != template.left_out:
            assert all(one in text for one in ([words] if isinstance(words, str) else words))
    takes = {"string": str, "first": str, "printed": str, "loop": list, "both": (str, list)}
    if all(isinstance(one["content"], takes[template.ways[one["role"]]]) for one in sent):
        [[expected], _] = render_jinja_template([sent], chat_template=template.source, add_generation_prompt=False)
        assert text == expected


def test_words_beside_a_call_may_be_left_out():
    source = (
        "{% for t in tools %}{{ t }}{% endfor %}{% for m in messages %}{% if m.tool_calls is not defined %}"
        "{{ m.role }}:{{ m.content }};{% else %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    )
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I look.", "tool_calls": calls}]
    template = ChatTemplate(source, {}, 10_000)
    assert "assistant" not in template.dialect.forms, "probes without tools fail"
    text = template.render(ChatRequest(chat=json.dumps(chat).encode(), tools=b'[{"type": "function"}]'))
    assert "I look." not in text
    assert '"name": "f"' in text


GATHERS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}|{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
LATE = (
    ("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("system", "d"), ("assistant", "e"),
    ("system", "f"), ("user", "g"), ("system", "h"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (STRING, "".join(f"{role}:{content};" for role, content in LATE)),
        (GEMMA_LIKE, "be brief{users}"),
        (GATHERS, "be brief|{users}"),
    ],
)
def test_a_system_message_in_the_middle_is_shown_there_whatever_the_template(source, shown):
    users = ("user:a;assistant:b;user:c\n\n{0}d{1};assistant:e;user:{0}f{1}\n\ng\n\n{0}h{1};").format(
        "<system-reminder>\n", "\n</system-reminder>"
    )
    assert rendered(source, *LATE, late_system_as_user=True) == shown.replace("{users}", users)


def test_a_system_message_after_a_result_is_part_of_it():
    chat = [("user", "a"), ("tool", "12"), ("system", "d")]
    reminder = "12\n\n<system-reminder>\nd\n</system-reminder>"
    assert rendered(GATHERS, *chat, late_system_as_user=True) == f"user:a;tool:{reminder};"
    empty = [("user", "a"), ("tool", ""), ("system", "d")]
    text = rendered(GATHERS, *empty, late_system_as_user=True)
    assert text.endswith("tool:;user:<system-reminder>\nd\n</system-reminder>;")


def test_what_users_say_in_a_row_is_one_message_where_roles_have_to_alternate():
    chat = [("system", "s"), ("user", "a"), ("user", PARTS), ("assistant", "b"), ("user", "c")]
    assert rendered(GEMMA_LIKE, *chat) == "suser:a\n\njusttwo;assistant:b;user:c;"
    late = [*chat[:2], ("system", "d"), *chat[2:]]
    reminder = "<system-reminder>\nd\n</system-reminder>"
    said = rendered(GEMMA_LIKE, *late, late_system_as_user=True)
    assert said == f"suser:a\n\n{reminder}\n\njusttwo;assistant:b;user:c;"
    with pytest.raises(TemplateError, match="alternate!"):
        rendered(GEMMA_LIKE, ("user", "a"), ("assistant", "b"), ("assistant", "c"))
    assert rendered(BOTH, *chat) == "system:s;user:a;user:[just][two];assistant:b;user:c;", "as sent, where it may be"


@given(st.lists(st.booleans(), min_size=MAX_RENDERINGS, max_size=MAX_RENDERINGS))
def test_any_template_gives_a_dialect_or_a_typed_error(fates):
    remaining = iter(fates)

    def render(messages, tools):
        if next(remaining):
            raise TemplateError("no", "messages")
        return str([one["content"] for one in messages])

    try:
        found = probe_template(render)
    except PrepareError:
        return
    assert set(found.forms) | set(found.left_out) | set(found.refused) <= {
        "user",
        "assistant",
        "system",
        "tool",
        "developer",
    }


FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<S>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_words_that_are_left_out_in_their_place_are_refused(role):
    assert rendered(FIRST_SYSTEM, (role, "S1"), ("user", "q")) == "<S>S1user:q;"
    with pytest.raises(TemplateError, match=r"leaves out messages\[1\], of the role 'system'"):
        rendered(FIRST_SYSTEM, ("system", "S1"), (role, "NEVER"), ("user", "q"))
    # What it leaves out of an assistant's turn is its own affair, and words that it changes show all the same.
    thinks = "{% for m in messages %}{{ m.content.split('</think>')[-1] | upper }};{% endfor %}"
    assert rendered(thinks, ("user", "q"), ("assistant", "<think>x</think>a"), ("user", "r")) == "Q;A;R;"


def test_changed_words_of_a_long_chat_cost_one_more_rendering():
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content | upper }};{% endfor %}", {}, 1_000_000)
    renderings = counted(template)
    chat = [{"role": "user", "content": f"word {i}"} for i in range(500)]
    assert template.render(ChatRequest(chat=json.dumps(chat).encode())).count("USER:") == 0
    assert len(renderings) == 2


def test_a_mark_is_none_that_the_chat_has():
    mark = "DOES_THE_TEMPLATE_SHOW_THIS_ROLE"
    knowing = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }};{% endif %}{% endfor %}"
    with pytest.raises(TemplateError, match="critic"):
        rendered(knowing, ("user", mark), ("critic", "words"))


def test_templates_may_make_dicts_from_keys():
    assert rendered(
        "{% for m in messages %}{{ m.content }}{{ dict.fromkeys('ab', 1) }}{% endfor %}", ("user", "q")
    ) == ("q{'a': 1, 'b': 1}")
