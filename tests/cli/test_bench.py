"""`meshctl bench` as it is typed, to servers on loopback."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import main as command_line
from cli.errors import BadKeys, CliError, NotRunning, WrongUsage
from cli.exit_codes import ExitCode
from mesh.testing.ports import free_port
from tests.cli.streaming import HEAD, WHOLE, Answer, streaming

pytestmark = pytest.mark.usefixtures("no_key")


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVMESH_")]:
        monkeypatch.delenv(name)


def typed(*words: str) -> Any:
    return CliRunner().invoke(command_line.app, ["bench", *words], catch_exceptions=False)


async def test_a_table_of_what_one_server_did(tmp_path: Path) -> None:
    async with streaming() as server:
        words = ("--url", server.url, "--requests", "6", "--prompt", "9", "--output-tokens", "5", "--warm-up", "2")
        done = await asyncio.to_thread(typed, *words, "--svg", str(tmp_path / "x.svg"))
    assert done.exit_code == ExitCode.OK, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"{server.url}: model"
    assert lines[1].startswith("6 of 6 requests whole in ")
    assert lines[2].startswith("30 tokens of output, ")
    assert [line.split()[:2] for line in lines[4:8]] == [["TTFT", "6"], ["ITL", "6"], ["TPOT", "6"], ["E2E", "6"]]
    assert len(server.bodies) == 8
    prompts = {tuple(body.pop("prompt")) for body in server.bodies}
    assert len(prompts) == 8, "also those for warming up"
    assert {len(prompt) for prompt in prompts} == {9}
    common = {"model": "model", "temperature": 0, "ignore_eos": True, "max_tokens": 5, "stream": True}
    assert server.bodies[0] == common | {"stream_options": {"include_usage": True}}
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


async def test_two_servers_get_the_same_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_API_KEY", "ours")
    (tmp_path / "key").write_text("theirs\n")
    async with streaming() as one, streaming() as other:
        words = ("--url", one.url, "--beside", other.url, "--beside-api-key-file", str(tmp_path / "key"))
        more = ("--requests", "3", "--rate", "200", "--turns", "2", "--warm-up", "0", "--no-ignore-eos", "-o", "json")
        done = await asyncio.to_thread(typed, *words, *more)
    assert done.exit_code == ExitCode.OK, done.output
    document = json.loads(done.stdout)
    assert [[turn["num_whole"] for turn in server["turns"]] for server in document["servers"]] == [[3, 3], [3, 3]]
    assert document["servers"][0]["all"]["num_whole"] == 6
    assert document["servers"][0]["turns"][0]["late_p99_ms"] >= 0
    assert set(document["ratios"]["ttft_p50"]) == {"least", "median", "greatest"}
    sent = [sorted(json.dumps(body) for body in server.bodies) for server in (one, other)]
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 6, "another turn has other prompts"
    assert "ignore_eos" not in one.bodies[0]
    assert all("Bearer ours" in head for head in one.heads)
    assert all("Bearer theirs" in head and "ours" not in head for head in other.heads)


async def test_what_one_server_refuses_neither_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(number: int) -> Answer:
        body = other.bodies[number]
        if isinstance(body["prompt"], list):
            return refused("prompt must be a string")
        return refused("extra fields not permitted: ignore_eos") if "ignore_eos" in body else (WHOLE, "close")

    def refused(why: str) -> Answer:
        return b"HTTP/1.1 422 No\r\nContent-Length: %d\r\n\r\n%s" % (len(why), why.encode()), "close"

    async with streaming() as one, streaming(picky) as other:
        words = ("--url", one.url, "--beside", other.url, "--requests", "4", "--turns", "2", "--prompt", "9")
        done = await asyncio.to_thread(typed, *words, "--warm-up", "2")
    assert done.exit_code == ExitCode.OK, done.output
    assert f"{other.url} takes no token ids: texts of about as many tokens are sent" in done.stderr
    assert f"{other.url} does not know ignore_eos: it is left out, so answers may end early" in done.stderr
    assert "tokens/s " in done.stdout
    for server in (one, other):
        measured = server.bodies[-8:]
        assert all("ignore_eos" not in body and len(body["prompt"].split()) == 9 for body in measured)
        assert len({body["prompt"] for body in measured}) == 8
    assert len(other.bodies) == 3 * 2 + 8, "and it is asked again only as long as there is something to leave out"


async def test_a_server_that_refuses_for_other_reasons_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b"HTTP/1.1 422 No\r\nContent-Length: 10\r\n\r\nignore_eos", "close"
    async with streaming(lambda _: answer) as server:
        done = await asyncio.to_thread(typed, "--url", server.url, "--requests", "2", "--warm-up", "1")
    assert done.exit_code == ExitCode.FAILED
    # Left out, and refused all the same.
    assert len(server.bodies) == 2 * 1 + 2
    assert "failed: 2 status 422" in done.stdout


async def test_our_own_key_is_none_of_another_server_s_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_API_KEY", "ours")
    async with streaming() as one, streaming() as other:
        words = ("--url", one.url, "--beside", other.url, "--requests", "1", "--turns", "1")
        done = await asyncio.to_thread(typed, *words)
    assert done.exit_code == ExitCode.OK, done.output
    assert all("Bearer ours" in head for head in one.heads)
    assert not any("Authorization" in head for head in other.heads)


async def test_the_next_run_has_other_prompts_unless_it_has_the_seed() -> None:
    async with streaming() as server:
        for seed in ([], [], ["--seed", "5"], ["--seed", "5"]):
            words = ("--url", server.url, "--requests", "1", "--warm-up", "0", *seed)
            await asyncio.to_thread(typed, *words)
    one, other, first, second = (body["prompt"] for body in server.bodies)
    assert one != other
    assert first == second


async def test_what_failed_is_counted_and_told_by_the_exit_code() -> None:
    answers = [(WHOLE, "close"), (HEAD, "close"), (b"", "reset")]
    async with streaming(lambda number: answers[number]) as server:
        words = ("--url", server.url, "--requests", "3", "--concurrency", "1", "--warm-up", "0")
        done = await asyncio.to_thread(typed, *words, "--model", "m")
    assert done.exit_code == ExitCode.FAILED
    assert "1 of 3 requests whole" in done.stdout
    assert "failed: 1 ended_early (no [DONE] after 0 events" in done.stdout
    assert "failed: 1 reset (" in done.stdout
    assert {body["model"] for body in server.bodies} == {"m"}


async def test_a_file_of_prompts_and_a_trace(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("first\nsecond\n")
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 3, "output_length": 4}\n' * 2)
    async with streaming() as server:
        chat = ("--url", server.url, "--warm-up", "0", "--endpoint", "chat")
        for file in ("prompts", "trace"):
            done = await asyncio.to_thread(typed, *chat, f"--{file}", str(tmp_path / file))
            assert done.exit_code == ExitCode.OK, done.output
    texts = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(texts[:2]) == ["first", "second"]
    assert [len(text.split()) for text in texts[2:]] == [3, 3]
    assert [body["max_tokens"] for body in server.bodies] == [64, 64, 4, 4]
    assert server.heads[1].startswith("POST /v1/chat/completions ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--trace x --rate 1", "--trace and --rate exclude each other"),
        ("--rate 1 --concurrency 2", "--rate and --concurrency exclude each other"),
        ("--prompts x --shared-prefix 2", "--prompts and --shared-prefix exclude each other"),
        ("--prompt 5 --shared-prefix 6", "--shared-prefix 6 is longer than --prompt 5"),
        ("--url nonsense --requests 1", "nonsense is not a valid address"),
    ],
)
def test_options_that_contradict_each_other(words: str, told: str) -> None:
    with pytest.raises(WrongUsage, match=told):
        typed(*words.split())


async def test_files_and_servers_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("{}\n")
    (tmp_path / "key").write_text("two words")
    for option in ("--trace", "--prompts"):
        for file in ("bad", "missing"):
            with pytest.raises(CliError, match="cannot be used"):
                typed("--url", "http://127.0.0.1:1", option, str(tmp_path / file))
    for file in ("key", "missing"):
        with pytest.raises(BadKeys):
            typed("--url", "http://127.0.0.1:1", "--api-key-file", str(tmp_path / file))
    with pytest.raises(NotRunning, match="does not say which models") as caught:
        await asyncio.to_thread(typed, "--url", f"http://127.0.0.1:{free_port()}")
    assert "connect" in caught.value.why


def test_no_mesh_and_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(NotRunning, match="no mesh named"):
        typed()


async def test_what_has_come_is_shown_at_ctrl_c() -> None:
    stalled = asyncio.Event()

    def answer(number: int) -> Answer:
        if number < 3:
            return WHOLE, "close"
        stalled.set()
        return b"", "stall"

    async with streaming(answer) as server:
        words = ("--url", server.url, "--concurrency", "1", "--warm-up", "0", "--model", "m")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "cli", "bench", *words),
            stdout=asyncio.subprocess.PIPE,
            # What a shell starts in the background has it ignored, and so have its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        await asyncio.wait_for(stalled.wait(), 30)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "3 of 3 requests whole" in out.decode()
