"""The check before a start: what is found of a model's texts, and files that loop, grow, crash or are not what they
should be. Each is told within seconds as a typed error, and no process is left behind.
"""

import base64
import json
import os
import subprocess
import sys
import time

import msgspec
import pytest

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelDamaged, ModelError, resolve_model
from nodes.model_spec.end_tokens import with_vocabulary
from nodes.models.fill_in import FillIn
from nodes.models.spec import VocabularyFacts
from nodes.tokenizer.child import checking
from nodes.tokenizer.child.checking import MAX_TEMPLATE_CHARS, check_texts
from nodes.tokenizer.child.protocol import Rendered, frame
from nodes.tokenizer.errors import Overloaded, TemplateError
from nodes.tokenizer.texts.encoding import load_encoder

pytestmark = pytest.mark.process

TINY, ECHO = resolve_model("tiny"), resolve_model("echo")
SHOWN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """The children of a test; all have ended at its end, and have been waited for."""
    checking._ask_child.cache_clear()
    started, popen = [], subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(checking.subprocess, "Popen", start)
    yield started
    assert all(child.returncode is not None and child.stdout.closed for child in started)


@pytest.fixture
def model_with(tmp_path):
    """A model whose `tokenizer.json` is another document."""

    def make(document):
        path = tmp_path / "tokenizer.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return msgspec.structs.replace(ECHO, tokenizer_path=str(path), vocab_size=300)

    return make


def tokenizer_with(**fields):
    return {**json.loads(byte_tokenizer_json()), **fields}


def test_what_is_found_of_a_model():
    facts = check_texts(TINY, TINY.chat_template)
    assert (facts.vocabulary.num_tokens, facts.vocabulary.eos_token_id) == (TINY.vocab_size, TINY.eos_token_ids[0])
    assert facts.forms == dict.fromkeys(("user", "assistant", "system", "tool"), "either")
    assert facts.notes == ()
    refusing = (
        "{% for m in messages %}{{ raise_exception('no ' ~ m.role) if m.role == 'tool' else m.content }}{% endfor %}"
    )
    assert check_texts(TINY, refusing).notes == ("the chat template refuses messages of the role tool: 'no tool'",)
    silent = check_texts(TINY, "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    assert silent.notes == ("the chat template leaves out messages of the role tool: such chats are refused",)
    assert check_texts(ECHO, None)[1:] == ({}, (), ())
    assert check_texts(TINY, SHOWN + "{% if documents %}{{ documents[0].text }}{% endif %}").reads == ("documents",)


def test_how_a_model_is_asked_for_a_middle_is_found_in_its_vocabulary(model_with):
    assert check_texts(ECHO, None).vocabulary.fill_in is None
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    # As Qwen2.5-Coder's file says it: they are no special tokens.
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [{"id": 259 + number, "content": mark, **flags} for number, mark in enumerate(marks)]
    document = json.loads(byte_tokenizer_json())
    document["added_tokens"] += added
    spec = model_with(document)
    fill_in = with_vocabulary(spec, check_texts(spec, None).vocabulary).fill_in
    assert fill_in == FillIn(*marks)
    text = fill_in.text("def f(", "):\n")
    ids = load_encoder(spec, 100).encode(text, add_special_tokens=False)
    assert ids == [259, *b"def f(", 260, *b"):\n", 261]


def test_a_template_may_name_the_models_special_tokens():
    needs = "{{ eos_token + '' }}" + SHOWN
    assert check_texts(ECHO, needs).notes == ()
    assert len(check_texts(msgspec.structs.replace(ECHO, special_tokens={}), needs).notes) == 4


def test_the_same_is_asked_once_and_another_file_again(children, model_with):
    first = check_texts(TINY, SHOWN)
    assert check_texts(resolve_model("tiny"), SHOWN) == first
    assert len(children) == 1
    spec = model_with(byte_tokenizer_json(300))
    assert check_texts(spec, SHOWN).vocabulary.num_tokens == 300
    model_with(byte_tokenizer_json(299))
    assert check_texts(spec, SHOWN).vocabulary.num_tokens == 299
    assert len(children) == 3


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS + SHOWN, "longer than 1 s"),
        (DOUBLING + "{{ ns.s }}" + SHOWN, "takes all memory|longer than 1 s"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "leaves out"),
        ("x" * 100_000_000, "at most 1048576"),
        ("{% if true %}" * 70_000, "cannot be compiled|crashed|longer than 1 s"),
        ("{{ " + "(" * 100_000 + ")" * 100_000 + " }}" + SHOWN, "cannot be compiled|crashed|longer than 1 s"),
        ("{{ " + "[" * 100_000 + "]" * 100_000 + " }}" + SHOWN, "cannot be compiled|crashed|longer than 1 s"),
        ("{{ " + "-" * 100_000 + "1 }}" + SHOWN, "cannot be compiled|crashed|longer than 1 s"),
        ("{{ a" + ".a" * 100_000 + " }}" + SHOWN, "cannot be compiled|crashed|longer than 1 s"),
        ("{{ a" + "+1" * 100_000 + " }}" + SHOWN, "cannot be compiled|crashed|longer than 1 s"),
        ("{% for %}", "cannot be compiled"),
        ("{% for m in messages %}{% for p in m.parts %}{{ p }}{% endfor %}{% endfor %}", "leaves out"),
        ("\ud800" + SHOWN, "not valid Unicode"),
    ],
    ids=lambda value: value[:20] + value[-20:] if len(value) > 40 else value,
)
def test_a_bad_template_is_told_within_seconds(template, words, monkeypatch):
    if "longer" in words:
        # Four of them would burn three seconds of a core each.
        monkeypatch.setattr(checking, "_TEMPLATE_S", 1.0)
    began = time.monotonic()
    with pytest.raises(TemplateError, match=words) as caught:
        check_texts(ECHO, template)
    assert time.monotonic() - began < 5
    assert len(caught.value.message) < 700


def test_the_longest_template():
    assert check_texts(ECHO, SHOWN + " " * (MAX_TEMPLATE_CHARS - len(SHOWN))).notes == ()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{}", "cannot be loaded"),
        ('{"model": ' + '{"a": ' * 100_000 + "}" * 100_000 + "}", "cannot be loaded"),
        # The library panics, which is no Exception.
        (
            tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"x").decode()}),
            "cannot be loaded: PanicException",
        ),
        # It aborts the process.
        (
            tokenizer_with(
                model={"type": "BPE", "vocab": {"é": 0, "éb": 2, "b": 3}, "merges": [["b", "é"]]}
                | {"continuing_subword_prefix": "b"}
            ),
            "crashes the process that loads it",
        ),
    ],
    ids=["empty", "deep", "panic", "abort"],
)
def test_a_bad_tokenizer_is_told_with_its_file(model_with, document, words):
    spec = model_with(document)
    with pytest.raises(ModelDamaged, match=words) as caught:
        check_texts(spec, SHOWN)
    assert spec.tokenizer_path in caught.value.message
    assert "ownload" in caught.value.message


def test_the_tokenizer_has_memory_of_its_own_and_so_has_the_template(monkeypatch, model_with):
    spec = model_with(byte_tokenizer_json(300))
    monkeypatch.setattr(checking, "_VOCABULARY_BYTES", 48 << 20)
    with pytest.raises((ModelDamaged, ModelError), match="loaded"):
        check_texts(msgspec.structs.replace(spec, vocab_size=4_000_000, tokenizer_path=""), SHOWN)
    monkeypatch.undo()
    fat = "{{ ('x' * 300000000) | length }}" + SHOWN
    assert check_texts(spec, fat).notes == (), "300 MB are within the limit"


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", ModelDamaged, "crashes the process"),
        ("import time; time.sleep(60)", ModelDamaged, "longer than 0.5 s to load"),
        ("import sys; sys.stdout.buffer.write(ANSWER + b'xxxx')", TemplateError, "crashed the process"),
        ("import sys; sys.stdout.buffer.write(ANSWER + b'\\1\\0\\0\\0\\xc1')", TemplateError, "crashed the process"),
        ("import sys; sys.stdout.buffer.write(ANSWER)", TemplateError, "crashed the process"),
        (
            "import sys, time; sys.stdout.buffer.write(ANSWER); sys.stdout.flush(); time.sleep(60)",
            TemplateError,
            "longer than 0.5 s",
        ),
    ],
)
def test_a_child_that_dies_hangs_or_answers_nonsense(monkeypatch, program, error, words):
    answer = frame(Rendered(vocabulary=VocabularyFacts(num_tokens=1)))
    monkeypatch.setattr(
        checking, "child_command", lambda: [sys.executable, "-c", program.replace("ANSWER", repr(answer))]
    )
    for name in ("_TEMPLATE_S", "_VOCABULARY_S", "_MARGIN_S"):
        monkeypatch.setattr(checking, name, 0.5)
    # More than a pipe holds, and nobody reads it.
    template = SHOWN + " " * 500_000
    with pytest.raises(error, match=words):
        check_texts(ECHO, template)


def test_no_process_to_be_had(monkeypatch):
    def refuse(*args, **kwargs):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(checking.subprocess, "Popen", refuse)
    with pytest.raises(Overloaded, match="no more processes"):
        check_texts(ECHO, SHOWN)


def test_the_supervisor_loads_neither_jinja_nor_tokenizers():
    program = "import sys, nodes.tokenizer.child.checking; print({'jinja2', 'tokenizers'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment) == b"set()\n"


def test_a_directory_that_is_gone_is_no_fault_of_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert check_texts(ECHO, SHOWN).forms["user"] == "string"


def test_python_that_cannot_start_is_no_fault_of_the_model(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise ImportError('not the one')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Overloaded, match="cannot start: ImportError: not the one"):
        check_texts(ECHO, SHOWN)
