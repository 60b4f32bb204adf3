"""Schemas and expressions tried out in a child process: refused, ignored in part, endless, fatal."""

import asyncio
import contextlib
import ctypes
import io
import os
import resource
import signal
from types import SimpleNamespace

import msgspec
import pytest

import nodes.asks
from nodes.asks.grammar import Grammar
from nodes.request import Asked
from nodes.tokenizer.child import ask_checks
from nodes.tokenizer.child import process as render_child
from nodes.tokenizer.child.ask_checks import AskChecks
from nodes.tokenizer.child.protocol import AsksToCheck, Rendered, Setup, frame
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import InvalidValue, Overloaded, UnsupportedSchema

pytestmark = pytest.mark.process

ENDLESS = '{"type":"integer","multipleOf":9999991}'


def asked(kind, text, *, strict=False):
    return [*nodes.asks.asked([Grammar(kind, text, "the_field", strict)])]


@pytest.fixture
@contextlib.asynccontextmanager
async def checks(settings):
    limits = {name: value for name, value in settings.items() if name != "use_process"}
    told = []
    made = AskChecks(RenderingLimits(**limits), told.append, use_process=settings.get("use_process", True))
    made.told = told
    try:
        yield made
    finally:
        await made.stop()


async def test_what_passes_is_remembered_and_what_is_ignored_told_once(checks):
    good, partly = asked("regex", "a+"), asked("json", '{"uniqueItems":true}')
    assert not checks.have_passed(good)
    for _ in range(2):
        await checks.check([*good, *partly])
    assert checks.have_passed([*good, *partly])
    assert len(checks.told) == 1
    assert "uniqueItems" in checks.told[0]


@pytest.mark.settings(use_process=False)
async def test_inline_it_is_the_same(checks):
    await checks.check(asked("json", '{"uniqueItems":true}'))
    assert len(checks.told) == 1
    with pytest.raises(UnsupportedSchema, match="uniqueItems") as raised:
        await checks.check(asked("json", '{"uniqueItems":true}', strict=True))
    assert (raised.value.param, checks.num_killed) == ("the_field", 0)


async def test_what_does_not_pass_says_why_each_time(checks):
    for _ in range(2):
        with pytest.raises(UnsupportedSchema, match="uniqueItems") as raised:
            await checks.check(asked("json", '{"uniqueItems":true}', strict=True))
        assert raised.value.param == "the_field"
        with pytest.raises(InvalidValue, match="leads back to itself"):
            await checks.check(asked("json", '{"$ref":"#"}'))
    assert checks.num_killed == 0


async def test_the_oldest_are_forgotten(checks, monkeypatch):
    monkeypatch.setattr(ask_checks, "_MAX_REMEMBERED", 2)
    for text in ("a", "b", "a", "c"):
        await checks.check(asked("regex", text))
    assert [checks.have_passed(asked("regex", text)) for text in "abc"] == [True, False, True]


@pytest.mark.settings(deadline_s=1.0)
async def test_one_that_never_ends_is_killed_and_the_next_is_served(checks):
    endless = asyncio.ensure_future(checks.check(asked("json", ENDLESS)))
    after = asyncio.ensure_future(checks.check(asked("regex", "a")))
    with pytest.raises(InvalidValue, match=r"'the_field' is too complex: compiling it took longer than 1 s"):
        await endless
    await after
    assert checks.num_killed == 1


@pytest.mark.settings(deadline_s=10.0)
async def test_while_one_takes_its_time_others_are_served(checks):
    await checks.check(asked("regex", "a"))
    endless = [asyncio.ensure_future(checks.check(asked("json", ENDLESS))) for _ in range(3)]
    await asyncio.sleep(0)  # they take the child that runs
    for text in "bcd":
        await checks.check(asked("regex", text))
    assert not any(one.done() for one in endless)
    os.kill(checks.children[0].pid, signal.SIGKILL)
    results = await asyncio.gather(*endless, return_exceptions=True)
    assert {type(one) for one in results} == {InvalidValue}
    assert checks.num_killed == 1, "of three alike one was tried"


@pytest.mark.settings(deadline_s=0.3)
async def test_what_has_killed_a_child_is_refused_for_a_while(checks, monkeypatch):
    for _ in range(3):
        with pytest.raises(InvalidValue, match=r"'the_field' is too complex.*longer than 0.3 s") as raised:
            await checks.check(asked("json", ENDLESS))
        assert raised.value.param == "the_field"
    assert checks.num_killed == 1
    monkeypatch.setattr(ask_checks.time, "monotonic", lambda now=ask_checks.time.monotonic: now() + 61)
    with pytest.raises(InvalidValue, match="longer than"):
        await checks.check(asked("json", ENDLESS))
    assert checks.num_killed == 2


@pytest.mark.settings(deadline_s=10.0)
async def test_a_child_that_dies_is_the_error_of_whom_it_worked_for(checks):
    await checks.check(asked("regex", "a"))
    endless = asyncio.ensure_future(checks.check(asked("json", ENDLESS)))
    await asyncio.sleep(0.2)
    os.kill(checks.children[0].pid, signal.SIGKILL)
    with pytest.raises(InvalidValue, match="crashed"):
        await endless
    await checks.check(asked("regex", "b"))


@pytest.mark.settings(max_waiting=1)
async def test_too_many_waiting_are_told_so(checks):
    tasks = [asyncio.ensure_future(checks.check(asked("regex", text))) for text in "ab"]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in results] == [type(None), Overloaded]


def test_a_panic_is_an_answer(monkeypatch):
    class Panic(BaseException):
        pass

    def panic(asks):
        raise Panic("index out of bounds")

    monkeypatch.setattr(nodes.asks, "check_asks", panic)
    monkeypatch.setattr(resource, "setrlimit", lambda *args: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *args: None))
    setup = Setup(
        template=None, special_tokens={}, max_chars=0, memory_bytes=1 << 30, parent_pid=os.getppid(), checks_asks=True
    )
    sink = io.BytesIO()
    question = AsksToCheck(asks=[Asked("grammar/2", True, b"")])
    render_child.serve(io.BytesIO(frame(setup) + frame(question)), sink)
    answers = sink.getvalue()
    answer = msgspec.msgpack.decode(answers[4 + int.from_bytes(answers[:4], "little") + 4 :], type=Rendered)
    assert (answer.code, "Panic" in answer.message) == ("invalid_value", True)
