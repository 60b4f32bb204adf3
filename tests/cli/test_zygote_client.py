"""The supervisor's end of the zygote, against stand-ins that behave badly."""

import asyncio
import os
import signal

import msgspec
import pytest

from cli.launch import zygote_client
from cli.launch.children import Children
from cli.launch.role import RoleRun
from cli.launch.zygote import Forked, ForkFailed, ZygoteReady
from cli.launch.zygote_client import ZygoteClient

RUN = RoleRun(mesh="m", role="worker", actor_id="w", epoch=1, config={})
READY = msgspec.msgpack.encode(ZygoteReady(import_s=0.5))
PREAMBLE = f"import os, socket, sys, time\nchannel = socket.socket(fileno=4)\nREADY = {READY!r}\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(program, main)`: the program stands where the zygote would; `main(client, children)`."""

    original = zygote_client.spawn_process

    def runner(program, main, timeout_s=20.0):
        monkeypatch.setattr(
            zygote_client, "spawn_process", lambda _, *others: original(["-c", PREAMBLE + program], *others)
        )

        async def wrapped():
            children = Children(asyncio.get_running_loop())
            reader, writer = os.pipe()
            client = ZygoteClient(
                children,
                [],
                log=tmp_path / "zygote.log",
                supervisor_fd=reader,
                environment=dict(os.environ),
                timeout_s=timeout_s,
            )
            try:
                async with asyncio.timeout(30):
                    await main(client, children)
            finally:
                client.close()
                await children.end_unwatched(1.0)
                children.close()
                os.close(reader)
                os.close(writer)

        asyncio.run(wrapped())

    return runner


def fork(client, tmp_path):
    """The pid, or the reason why not."""
    future = asyncio.get_running_loop().create_future()
    client.fork(RUN, tmp_path / "w.log", future.set_result, future.set_result)
    return future


def answering(message):
    return f"channel.send(READY)\nwhile channel.recv(65536): channel.send({msgspec.msgpack.encode(message)!r})\n"


def test_pids_and_reasons_are_handed_on(run, tmp_path):
    async def forked(client, children):
        assert await fork(client, tmp_path) == 77
        assert client.import_s == 0.5

    async def failed(client, children):
        assert await fork(client, tmp_path) == "two threads"

    run(answering(Forked(number=1, pid=77)), forked)
    run(answering(ForkFailed(number=1, reason="two threads")), failed)


def test_one_that_dies_fails_its_requests_and_the_next_starts_another(run, tmp_path):
    async def main(client, children):
        assert "exit 3" in await fork(client, tmp_path)
        assert client.pid is None
        assert "exit 3" in await fork(client, tmp_path)

    run("channel.send(READY)\nchannel.recv(65536)\nsys.exit(3)\n", main)
    run("sys.exit(3)\n", main)


def test_an_actor_that_nobody_heard_of_ends_with_its_zygote(run, tmp_path):
    async def main(client, children):
        assert "exit 0" in await fork(client, tmp_path)
        assert children.unwatched() == []

    run("channel.send(READY)\nchannel.recv(65536)\nif os.fork() == 0:\n    time.sleep(600)\n", main)


def test_one_that_hangs_is_killed(run, tmp_path):
    async def main(client, children):
        assert "SIGKILL" in await fork(client, tmp_path)

    run("time.sleep(600)\n", main, timeout_s=0.3)
    run("channel.send(READY)\nchannel.recv(65536)\ntime.sleep(600)\n", main, timeout_s=0.5)


def test_closing_fails_what_waits(run, tmp_path):
    async def main(client, children):
        future = fork(client, tmp_path)
        client.close()
        assert await future == "the supervisor stops"

    run("time.sleep(600)\n", main)


def test_a_configuration_too_large_for_a_frame(run, tmp_path):
    async def main(client, children):
        big = msgspec.structs.replace(RUN, config={"x": "y" * (1 << 17)})
        future = asyncio.get_running_loop().create_future()
        client.fork(big, tmp_path / "w.log", future.set_result, future.set_result)
        assert "of 65536 bytes" in await future

    run("channel.send(READY)\nchannel.recv(65536)\n", main)


def test_it_ends_when_the_supervisor_hangs_up(run, tmp_path):
    async def main(client, children):
        client.start()
        pid = client.pid
        client.close()
        await children.end_unwatched(20.0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    run("channel.send(READY)\nwhile channel.recv(65536): pass\n", main)
