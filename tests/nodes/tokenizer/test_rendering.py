"""Rendering in a child process: the same text, and templates that never end, take all memory, or die."""

import asyncio
import contextlib
import ctypes
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from nodes.model_spec import resolve_model
from nodes.tokenizer.child import bounded_child
from nodes.tokenizer.child import process as render_child
from nodes.tokenizer.child.protocol import Rendered, Setup, child_command, frame
from nodes.tokenizer.child.rendering import ChildRenderer, InlineRenderer
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import ContextLengthExceeded, Overloaded, TemplateError
from nodes.tokenizer.templates.chat_template import ChatRequest

pytestmark = pytest.mark.process

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if bomb %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if fat %}{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    "{{ ns.s | length }}{% endif %}"
    "{% if long %}{% for i in range(9999) %}{{ 'x' * 100 }}{% endfor %}{% endif %}"
)


def chat(text, **kwargs):
    return ChatRequest(
        chat=json.dumps([{"role": "user", "content": text}]).encode(), chat_template_kwargs=json.dumps(kwargs).encode()
    )


@pytest.fixture
@contextlib.asynccontextmanager
async def renderer(settings):
    """One with a child that has started."""
    template = settings.get("template", TEMPLATE)
    limits = {name: value for name, value in settings.items() if name != "template"}
    renderer = ChildRenderer(template, {"bos_token": "<s>"}, 20_000, RenderingLimits(**limits))
    try:
        await renderer.start()
        yield renderer
    finally:
        pid = renderer.child.pid
        await renderer.stop()
        if pid is not None:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_same_text_as_inline(renderer):
    inline = InlineRenderer(TEMPLATE, {}, 20_000)
    assert await inline.start() == await renderer.start() == ""
    for text in ("", "é🙂", "x" * 20_000):
        assert await renderer.render(chat(text)) == await inline.render(chat(text)) == text
    await inline.stop()
    texts = await asyncio.gather(*(renderer.render(chat(str(i))) for i in range(50)))
    assert texts == [str(i) for i in range(50)]


@pytest.mark.settings(deadline_s=0.2)
async def test_endless_template_is_killed_at_its_deadline_and_the_next_chat_served(renderer):
    loop = asyncio.get_running_loop()
    started = loop.time()
    bomb = asyncio.ensure_future(renderer.render(chat("a", bomb=True)))
    after = asyncio.ensure_future(renderer.render(chat("b")))
    with pytest.raises(TemplateError, match=r"longer than 0\.2 s"):
        await bomb
    assert loop.time() - started < 2
    assert await after == "b"
    assert renderer.child.num_killed == 1


@pytest.mark.settings(memory_bytes=1 << 28, deadline_s=20)
async def test_template_that_takes_all_memory(renderer):
    with pytest.raises(TemplateError):
        await renderer.render(chat("a", fat=True))
    assert await renderer.render(chat("b")) == "b"


async def test_output_is_bounded(renderer):
    with pytest.raises(ContextLengthExceeded):
        await renderer.render(chat("a", long=True))
    assert await renderer.render(chat("b")) == "b"
    assert renderer.child.num_killed == 0


async def test_child_that_died_is_replaced(renderer):
    os.kill(renderer.child.pid, signal.SIGKILL)
    try:
        text = await renderer.render(chat("a"))
    except TemplateError:
        text = await renderer.render(chat("a"))
    assert text == "a"


@pytest.mark.settings(template="{% for %}")
async def test_template_that_does_not_compile_is_told_at_start_and_each_requests_error(renderer):
    assert "cannot be compiled" in await renderer.start()
    for _ in range(2):
        with pytest.raises(TemplateError, match="cannot be compiled"):
            await renderer.render(chat("a"))


@pytest.mark.parametrize(
    ("template", "words", "limits"),
    [("{% for m in messages %}{% for p in m.parts %}{{ p }}{% endfor %}{% endfor %}", "leaves out", {}),
     ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.5 s",
      {"start_timeout_s": 0.5})],
)  # fmt: skip
async def test_template_that_cannot_be_used_is_told_at_start_and_each_requests_error(template, words, limits):
    renderer = ChildRenderer(template, {}, 1000, RenderingLimits(**limits))
    try:
        assert words in await renderer.start()
        with pytest.raises(TemplateError, match=words):
            await renderer.render(chat("a"))
    finally:
        await renderer.stop()


async def test_parts_are_shown_inline_and_by_the_child_alike():
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    child, inline = ChildRenderer(template, {}, 100, RenderingLimits()), InlineRenderer(template, {}, 100)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    try:
        for said, text in (("a", "a;"), (parts, "a;b;")):
            assert await child.render(chat(said)) == await inline.render(chat(said)) == text
    finally:
        await child.stop()


async def test_a_cancelled_request_does_not_answer_the_next(renderer):
    task = asyncio.ensure_future(renderer.render(chat("slow", bomb=True)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await renderer.render(chat("next")) == "next"


async def test_a_reply_that_is_too_long_is_not_read(renderer, monkeypatch):
    monkeypatch.setattr(bounded_child, "_REPLY_MARGIN_BYTES", 10)
    renderer._max_chars = 0
    with pytest.raises(TemplateError):
        await renderer.render(chat("x" * 100))


@pytest.mark.settings(max_waiting=2)
async def test_too_many_waiting_are_told_so(renderer):
    tasks = [asyncio.ensure_future(renderer.render(chat("a"))) for _ in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [str, str, Overloaded]


async def test_no_process_to_be_had(monkeypatch):
    async def refuse(*args, **kwargs):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    renderer = ChildRenderer(TEMPLATE, {}, 1000, RenderingLimits())
    with pytest.raises(Overloaded):
        await renderer.start()
    await renderer.stop()


def served(source, *requests, parent_pid, **fields):
    """What the child's loop answers, run here without its limits."""
    setup = Setup(
        template=source, special_tokens={}, max_chars=100, memory_bytes=1 << 30, parent_pid=parent_pid, **fields
    )
    sink = io.BytesIO()
    render_child.serve(io.BytesIO(b"".join(map(frame, (setup, *requests)))), sink)
    replies, rest = [], sink.getvalue()
    while rest:
        size = int.from_bytes(rest[:4], "little")
        replies.append(msgspec.msgpack.decode(rest[4 : 4 + size], type=Rendered))
        rest = rest[4 + size :]
    return replies


@pytest.fixture
def unlimited(monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *args: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *args: None))


@pytest.mark.usefixtures("unlimited")
def test_protocol_of_the_child():
    ours = os.getppid()
    replies = served(TEMPLATE, chat("a"), chat("x" * 101), chat("b"), parent_pid=ours)
    assert [(r.text, r.code) for r in replies] == [("", ""), ("a", ""), ("", "context_length_exceeded"), ("b", "")]
    assert [r.code for r in served("{% for %}", chat("a"), parent_pid=ours)] == ["template_error"] * 2
    render_child.serve(io.BytesIO(), io.BytesIO())


@pytest.mark.usefixtures("unlimited")
def test_a_vocabulary_is_answered_before_the_template(tmp_path, monkeypatch):
    ours, spec = os.getppid(), resolve_model("echo")
    first, second = served(TEMPLATE, parent_pid=ours, vocabulary=spec)
    assert (first.vocabulary.num_tokens, first.dialect) == (spec.vocab_size, None)
    assert second.dialect.forms["user"] == "string"
    assert served(None, parent_pid=ours, vocabulary=spec)[1].dialect.forms == {}
    bad = msgspec.structs.replace(spec, tokenizer_path=str(tmp_path))
    assert served(None, parent_pid=ours, vocabulary=bad)[0].code == "model_damaged"

    def panic(spec):
        raise Panic("unwrap of None")

    monkeypatch.setattr("nodes.model_spec.vocabulary.vocabulary_facts", panic)
    answer, _ = served(None, parent_pid=ours, vocabulary=bad)
    assert answer.code == "model_damaged"
    assert answer.message == f"{tmp_path} cannot be loaded: Panic: unwrap of None. Download it again."
    monkeypatch.setattr(render_child, "Path", lambda name: tmp_path / "none")
    assert render_child._mapped_bytes() == 0


class Panic(BaseException):
    """As the library's, which is no Exception."""


@pytest.mark.usefixtures("unlimited")
def test_child_of_a_dead_parent_ends():
    with pytest.raises(SystemExit):
        served(TEMPLATE, parent_pid=-1)


def test_child_ends_quietly_when_nobody_reads():
    setup = Setup(template=TEMPLATE, special_tokens={}, max_chars=100, memory_bytes=1 << 30, parent_pid=os.getpid())
    child = subprocess.Popen(child_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    _, errors = child.communicate(frame(setup) + frame(chat("a")), timeout=30)
    assert errors == b""


ORPHAN = """
import asyncio, sys
from nodes.tokenizer.templates.chat_template import ChatRequest
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.child.rendering import ChildRenderer

async def main():
    renderer = ChildRenderer(sys.argv[1], {}, 1000, RenderingLimits(deadline_s=60))
    await renderer.start()
    bomb = b'[{"role": "user", "content": "a"}]', b'{"bomb": true}'
    task = asyncio.ensure_future(renderer.render(ChatRequest(chat=bomb[0], chat_template_kwargs=bomb[1])))
    await asyncio.sleep(0.1)
    print(renderer.child.pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_child_in_an_endless_template_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, TEMPLATE], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    with os.fdopen(os.pidfd_open(child)) as pidfd:
        parent.kill()
        parent.wait()
        assert select.select([pidfd], [], [], 10)[0]
    parent.stdout.close()
