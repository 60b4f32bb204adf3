"""Engines in this process, with meshes of their own and beside one that serves HTTP; programs that have one, killed."""

import asyncio
import contextlib
import ctypes
import itertools
import json
import operator
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from nodes import Engine
from nodes.engine.errors import EngineClosed, MeshGone, StartFailed, WrongLoop, WrongProcess
from nodes.gateway.errors import ApiError, BadRequest
from tests.process.conftest import wait_until

pytestmark = pytest.mark.process

GREEDY = {"max_new_tokens": 8, "temperature": 0}
FEW = {"scheduler": {"max_waiting": 20}, "gateway": {"max_inflight": 100}}
"""Less room than batches need: the scheduler refuses some of what the gateway has room for."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run directory for this process's engines."""
    with contextlib.ExitStack() as stack:
        # Under /tmp and short: paths of sockets are at most a hundred bytes.
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="km")))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("XDG_RUNTIME_DIR", str(base))
        yield base


@pytest.fixture(scope="module")
def engine(base):
    with Engine("echo", mixed=1, max_running=16, pooling="mean,normalize", roles=FEW) as engine:
        yield engine
    assert not [path for path in base.rglob("*") if not path.is_dir()]


def running(engine):
    return engine._inside.seat._gateway.service.core.num_requests


def test_batches_beyond_the_room_are_answered_in_order(engine):
    prompts = [f"{number} is one" for number in range(1000)]
    answers = engine.generate(prompts, {"max_new_tokens": 20})
    assert [answer["text"] for answer in answers] == prompts
    assert engine._inside._room.feeder.num_requests == 0
    # Also of several threads at once, with n, and as a stream.
    found = {}

    def ask(name):
        found[name] = engine.generate([name] * 100, {**GREEDY, "n": 2})

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    last = {event["index"]: event for event in engine.generate(prompts[:300], {"max_new_tokens": 20}, stream=True)}
    for thread in threads:
        thread.join()
    assert [last[number]["text"] for number in range(300)] == prompts[:300]
    assert {name: [one["text"] for one in answers] for name, answers in found.items()} == {
        name: [name] * 200 for name in ("left", "right")
    }


def test_streams_grow_and_one_that_is_left_early_ends(engine):
    texts = [event["text"] for event in engine.generate("a stream", GREEDY, stream=True)]
    assert texts[-1] == "a stream"
    assert all(text.startswith(before) for before, text in itertools.pairwise(texts))
    long = "x" * 4000
    with engine.generate([long] * 40, {"max_new_tokens": 4000}, stream=True) as stream:
        assert next(stream)["text"]
    wait_until(lambda: not running(engine), "what was left early has ended")
    # So does one that is forgotten, and a call that nobody awaits any more.
    assert next(iter(engine.generate(long, {"max_new_tokens": 4000}, stream=True)))["text"]
    wait_until(lambda: not running(engine), "what was forgotten has ended")

    async def give_up():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.async_generate([long] * 40, {"max_new_tokens": 4000})

    asyncio.run(give_up())
    wait_until(lambda: not running(engine), "what nobody awaits has ended")


def test_any_loop_may_ask_but_a_stream_stays_in_its_own(engine):
    async def ask():
        # As in a notebook, where a loop runs in the thread that asks.
        assert engine.generate("in a loop", GREEDY)["text"] == "in a loo"
        answers = await asyncio.gather(*(engine.async_generate(f"ask {number}", GREEDY) for number in range(5)))
        assert [one["text"] for one in answers] == [f"ask {number}" for number in range(5)]
        stream = await engine.async_chat([{"role": "user", "content": "hello"}], max_tokens=50, stream=True)
        return stream, await anext(stream)

    async def go_on(stream):
        return await anext(stream)

    asyncio.run(ask())
    stream, first = asyncio.run(ask())
    assert first["object"] == "chat.completion.chunk"
    with pytest.raises(WrongLoop, match="another event loop"):
        asyncio.run(go_on(stream))
    with pytest.raises(WrongLoop, match="own thread"):
        asyncio.run_coroutine_threadsafe(_use(engine), engine._thread._loop).result(10)


async def _use(engine):
    engine.generate("on its own thread")


def test_vectors_and_scores_of_any_number_of_texts(engine):
    texts = [f"{number} is one" for number in range(150)]
    found = engine.encode(texts)
    vectors = [one["embedding"] for one in found]
    assert vectors[::50] == [engine.encode(text)["embedding"] for text in texts[::50]]
    assert [one["meta_info"]["prompt_tokens"] for one in found] == [*map(len, texts)]
    assert len({one["meta_info"]["id"] for one in found}) == 150
    named = engine.encode(input_ids=[[*text.encode()] for text in texts[:2]], rid=["a", "b"])
    assert [one["embedding"] for one in named] == vectors[:2]
    assert [one["meta_info"]["id"] for one in named] == ["a", "b"]
    # Each call has the query beside its items, and room for both.
    cosines = [sum(map(operator.mul, vectors[7], vector)) for vector in vectors]
    assert engine.score(texts[7], texts) == pytest.approx(cosines, abs=1e-6)
    assert engine.score("x", texts[0]) == engine.score("x", texts[:1])
    assert engine._inside._room.feeder.num_requests == 0


def test_how_likely_tokens_are_behind_a_query_and_an_item(engine):
    # An echo says the first token of its prompt.
    items = [f"{number} is one" for number in range(200)]
    assert engine.score("a", items, [97, 98]) == [[1.0, 0.0]] * 200
    assert engine.score("a", ["b", "c"], [97, 98], item_first=True) == [[0.0, 1.0], [0.0, 0.0]]
    assert engine.score([97], [[98], [99]], [98, 97], apply_softmax=True) == [[0.0, 1.0]] * 2
    asked = engine.generate("ab", GREEDY, return_logprob=True, token_ids_logprob=[97])
    assert asked["meta_info"]["output_token_ids_logprobs"][0] == [[0.0, 97, None]]

    async def ask():
        return await asyncio.gather(
            engine.async_score("a", "b", [97]), engine.async_score("a", ["a"]), engine.async_encode("a")
        )

    likely, cosines, vector = asyncio.run(ask())
    assert (likely, cosines) == ([[1.0]], [pytest.approx(1.0)])
    assert vector["embedding"] == engine.encode("a")["embedding"]
    assert engine.score("a", []) == engine.score("a", [], [97]) == []


def test_what_is_wrong_is_named(engine):
    wrong = [
        (lambda: engine.generate("a", {"temprature": 1}), "sampling_params.temprature"),
        (lambda: engine.generate("a", no_such=1), "no_such"),
        (lambda: engine.generate("a", {"max_new_tokens": object()}), None),
        (lambda: engine.generate(["a", ""], GREEDY), "text"),
        (lambda: engine.generate(input_ids=[[1], [10**6]]), "input_ids"),
        (lambda: next(engine.generate("a", {"max_new_tokens": 10**9}, stream=True)), "sampling_params.max_new_tokens"),
        (lambda: engine.chat([{"role": "user", "content": "x"}], max_tokenz=1), "max_tokenz"),
        (lambda: engine.encode("a", dimensions=10**6), "dimensions"),
        (lambda: engine.encode("a", no_such=1), "no_such"),
        (lambda: engine.score("a", ["b"], [10**6]), "token_ids_logprob"),
        (lambda: engine.score("a", ["b"] * 40 + [""]), "documents.40"),
    ]
    for ask, param in wrong:
        with pytest.raises(BadRequest) as caught:
            ask()
        assert caught.value.param == param, caught.value.message
    # Of many prompts, those among which it is.
    with pytest.raises(ApiError) as caught:
        engine.generate(["a"] * 50 + [""], [GREEDY] * 51)
    assert caught.value.__notes__ == ["prompt 50 of 51"]
    assert str(caught.value).startswith("'text' is empty")
    assert engine.generate("it goes on", GREEDY)["text"] == "it goes "


def test_only_the_process_that_made_it_can_use_it(engine):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.close()
            engine.generate("x")
        except WrongProcess as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        assert f"Engine.attach('{engine.name}')" in said.read()
    with pytest.raises(WrongProcess, match="make one there"):
        engine.__reduce__()
    assert engine.generate("still here", GREEDY)["text"] == "still he"


@pytest.mark.slow
def test_a_lock_that_is_held_loses_nothing(base):
    held_s, got, text = 10, [], "a" * 300
    # Sixteen requests take longer than the lock is held, and sixteen more wait for them.
    with Engine("echo?step_ms=50", mixed=1, max_running=16) as engine:
        stream = engine.generate(text, {"max_new_tokens": 300}, stream=True)
        assert next(stream)["text"]
        asking = threading.Thread(target=lambda: got.extend(engine.generate([text] * 32, {"max_new_tokens": 300})))
        asking.start()
        wait_until(lambda: running(engine) == 33, "all are under way")
        # Called with the interpreter's lock held, unlike by `ctypes.CDLL`.
        ctypes.PyDLL(None).usleep(held_s * 1_000_000)
        asking.join()
        *_, last = stream
        assert last["text"] == text
        assert [one["text"] for one in got] == [text] * 32
        # The mesh gave this gateway up meanwhile, and its requests began again.
        assert engine._inside.seat._gateway.service.core.num_retries > 0


def test_it_attaches_to_a_mesh_that_serves_http_and_answers_as_that_does(base, engine, host, monkeypatch):
    host.up("--model", "echo", "--mixed", "1", "--pooling", "mean")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.base))

    def post(path, body):
        request = urllib.request.Request(
            host.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read()

    def without_ids(answer):
        for one in answer if isinstance(answer, list) else [answer]:
            (one.get("meta_info") or one).pop("id")
            one.pop("created", None)
        return answer

    def events(data):
        lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n")]
        return [json.loads(line) for line in lines if line not in (b"", b"[DONE]")]

    with Engine.attach(host.name) as attached:
        for fields in (
            {"text": "one prompt", "sampling_params": GREEDY},
            {"text": ["several", "prompts"], "sampling_params": {**GREEDY, "n": 2}},
            {"input_ids": [104, 105], "sampling_params": {"max_new_tokens": 20, "stop": "i"}},
        ):
            said = {"prompt" if name == "text" else name: value for name, value in fields.items()}
            assert without_ids(attached.generate(**said)) == without_ids(json.loads(post("/generate", fields)))
        chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 9}
        by_http = json.loads(post("/v1/chat/completions", {**chat, "model": "echo"}))
        assert without_ids(attached.chat(**chat)) == without_ids(by_http)
        last = events(post("/generate", {"text": "one", "sampling_params": GREEDY, "stream": True}))[-1]
        assert without_ids(list(attached.generate("one", GREEDY, stream=True))[-1]) == without_ids(last)
        vectors = json.loads(post("/v1/embeddings", {"input": ["one", "another"]}))["data"]
        found = attached.encode(["one", "another"])
        assert [one["embedding"] for one in found] == [one["embedding"] for one in vectors]
        assert without_ids(found) == without_ids(json.loads(post("/encode", {"text": ["one", "another"]})))
        scored = json.loads(post("/score", {"text_1": "one", "text_2": ["another", "one"]}))["data"]
        assert attached.score("one", ["another", "one"]) == [one["score"] for one in scored]
        assert engine.generate("both at once", GREEDY)["text"] == "both at "
        listed = host.ps()
        assert [entry["role"] for name, entry in listed.items() if name.startswith("engine-")] == ["gateway"]
    with pytest.raises(EngineClosed):
        attached.generate("x")
    assert json.loads(post("/generate", {"text": "it serves on", "sampling_params": GREEDY}))["text"] == "it serve"
    with Engine.attach(host.name) as attached:
        stream = attached.generate("x" * 4000, {"max_new_tokens": 4000}, stream=True)
        next(stream)
        os.kill(listed["supervisor"]["pid"], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(MeshGone, match="its supervisor has ended"):
            for _ in stream:
                pass
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "no-such-model"}, "cannot be served"),
        ({"port": 8000}, "port cannot be given to an Engine"),
        ({"control": True}, "control cannot be given to an Engine"),
        ({"modle": "echo"}, "there is no setting modle"),
    ],
)
def test_a_mesh_that_cannot_start_says_why(base, settings, said):
    with pytest.raises(StartFailed, match=said):
        Engine(**settings)


def test_what_is_not_there_cannot_be_attached_to(base):
    with pytest.raises(StartFailed, match="no mesh named 'nowhere' is running"):
        Engine.attach("nowhere")


PROGRAM = """
import sys
from nodes import Engine
engine = Engine("echo", mixed=1)
print(engine.name, flush=True)
while True:
    engine.generate(["x" * 1000] * 64, {"max_new_tokens": 1000})
"""


@pytest.fixture
def program(host):
    """A program that has an engine, and works; the host is named as the engine's mesh."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=host.environment
    ) as it:
        host.started.append(it)
        host.name = it.stdout.readline().strip()
        yield it


def test_nothing_is_left_of_a_killed_program_and_the_next_start_removes_what_others_left(host, program, monkeypatch):
    wait_until(lambda: len(host.processes()) > 5 and host.segments(), "it runs")
    program.kill()
    program.wait()
    # Well within five seconds, which is the promise.
    host.assert_nothing_left(within_s=5.0)
    assert not host.run_directory.exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.base))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=host.environment
    ) as it:
        host.name = it.stdout.readline().strip()
        # All at once: stopped first, none can do anything about the others' ends.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in host.processes():
                os.kill(pid, number)
    wait_until(lambda: not host.processes(), "all are dead")
    assert host.segments()
    assert host.run_directory.exists()
    with Engine("echo", mixed=1) as engine:
        assert not host.segments()
        assert not host.run_directory.exists()
        [supervisor] = [pid for pid in host.processes() if b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        stream = engine.generate("x" * 4000, {"max_new_tokens": 4000}, stream=True)
        next(stream)
        os.kill(supervisor, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(MeshGone, match="its supervisor has ended"):
            for _ in stream:
                pass
        assert time.monotonic() - began < 5.0
        with pytest.raises(MeshGone, match="make another one"):
            engine.generate("x")
    host.name = engine.name


@pytest.mark.parametrize("num_processes", [2, 3])
def test_no_process_is_left_of_a_program_that_is_killed_while_its_engine_starts(host, num_processes):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.DEVNULL, env=host.environment) as it:
        # Two: it has just started its supervisor. Three: which has started the process that actors are forked from.
        wait_until(lambda: len(host.processes()) >= num_processes, "it starts")
        it.kill()
    host.assert_nothing_left(within_s=5.0)


def test_a_program_that_forgets_its_engine_ends_and_so_does_its_mesh(host):
    program = "from nodes import Engine\nengine = Engine('echo', mixed=1)\nprint(engine.name, flush=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=host.environment, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    host.name = done.stdout.strip()
    host.assert_nothing_left(within_s=5.0)
