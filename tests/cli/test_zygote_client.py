"""The supervisor's end of the zygote, against stand-ins that behave badly."""

import asyncio
import os
import signal

import msgspec
import pytest

from cli.supervisor import zygote_client
from cli.supervisor.children import Children
from cli.supervisor.exits import Exits
from cli.supervisor.processes import Process
from cli.supervisor.role import RoleRun
from cli.supervisor.zygote import Forked, ForkFailed, ZygoteReady
from cli.supervisor.zygote_client import ZygoteClient

RUN = RoleRun(mesh="m", role="worker", actor_id="w", epoch=1, config={})
READY = msgspec.msgpack.encode(ZygoteReady(import_s=0.5))
PREAMBLE = f"import os, socket, sys, time\nchannel = socket.socket(fileno=4)\nREADY = {READY!r}\n"


@pytest.fixture
def deaths():
    """What the client has told of ends."""
    return []


@pytest.fixture
def run(tmp_path, monkeypatch, deaths):
    """`run(program, main)`: the program stands where the zygote would, None: the real one; `main(client, children)`."""

    original = zygote_client.spawn_process

    def runner(program, main, timeout_s=20.0):
        if program is not None:
            monkeypatch.setattr(
                zygote_client, "spawn_process", lambda _, *others: original(["-c", PREAMBLE + program], *others)
            )

        async def wrapped():
            children = Children(asyncio.get_running_loop())
            reader, writer = os.pipe()
            client = ZygoteClient(
                children,
                Exits([]),
                [],
                on_death=deaths.append,
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
    """The process, or the reason why not."""
    future = asyncio.get_running_loop().create_future()
    client.fork(RUN, tmp_path / "w.log", future.set_result, lambda reason, _: future.set_result(reason))
    return future


def answering(message):
    return f"channel.send(READY)\nwhile channel.recv(65536): channel.send({msgspec.msgpack.encode(message)!r})\n"


def test_pids_and_reasons_are_handed_on(run, tmp_path):
    async def forked(client, children):
        assert await fork(client, tmp_path) == Process(77, 5)
        assert client.import_s == 0.5

    async def failed(client, children):
        assert await fork(client, tmp_path) == "two threads"

    run(answering(Forked(number=1, pid=77, start_time=5)), forked)
    run(answering(ForkFailed(number=1, reason="two threads")), failed)


def test_one_that_dies_fails_its_requests_and_the_next_starts_another(run, tmp_path):
    async def main(client, children):
        assert "exit 3" in await fork(client, tmp_path)
        assert client.pids == []
        assert "exit 3" in await fork(client, tmp_path)

    run("channel.send(READY)\nchannel.recv(65536)\nsys.exit(3)\n", main)
    run("sys.exit(3)\n", main)


async def until(condition):
    """Look again until it is true; what another process does can only be polled."""
    while not condition():
        await asyncio.sleep(0.01)


def test_a_killed_zygote_is_followed_by_its_spare_and_that_one_has_a_spare_too(run, tmp_path, deaths):
    async def main(client, children):
        client.start()
        await until(lambda: len(client.pids) == 2)
        # More of them one after the other than a stack that grew each time would hold is for the soak to show.
        for _ in range(3):
            serving, spare = client.pids
            os.kill(serving, signal.SIGKILL)
            await until(lambda spare=spare: client.pids[:1] == [spare] and len(client.pids) == 2)
            assert isinstance(await fork(client, tmp_path), Process)
            # A time would tell nothing: a fork takes 18 ms on a busy machine, and importing nothing 15.
            assert client.pids[0] == spare, "it was imported again"
        assert [end.foreign for end in deaths] == [True] * 3

    run(None, main)


def test_a_killed_spare_is_replaced(run, tmp_path):
    async def main(client, children):
        client.start()
        await until(lambda: len(client.pids) == 2)
        serving, spare = client.pids
        os.kill(spare, signal.SIGKILL)
        await until(lambda: len(client.pids) == 2 and spare not in client.pids)
        assert client.pids[0] == serving

    run(None, main)


def test_both_killed_at_once_are_started_anew_and_what_was_asked_fails_by_a_foreign_hand(run, tmp_path):
    async def main(client, children):
        client.start()
        await until(lambda: len(client.pids) == 2)
        first = client.pids
        failed = asyncio.get_running_loop().create_future()
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        client.fork(RUN, tmp_path / "w.log", failed.set_result, lambda _, foreign: failed.set_result(foreign))
        assert await failed is True
        await until(lambda: len(client.pids) == 2)
        assert not set(first) & set(client.pids)

    run(None, main)


def test_an_actor_that_nobody_heard_of_ends_with_its_zygote(run, tmp_path):
    async def main(client, children):
        assert "exit 0" in await fork(client, tmp_path)
        assert children.unwatched() == []

    run("channel.send(READY)\nchannel.recv(65536)\nif os.fork() == 0:\n    time.sleep(600)\n", main)


def test_one_that_hangs_is_killed_which_is_not_a_foreign_kill(run, tmp_path, deaths):
    async def main(client, children):
        assert "SIGKILL" in await fork(client, tmp_path)
        assert not deaths[-1].foreign

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
        client.fork(big, tmp_path / "w.log", future.set_result, lambda reason, _: future.set_result(reason))
        assert "of 65536 bytes" in await future

    run("channel.send(READY)\nchannel.recv(65536)\n", main)


def test_it_ends_when_the_supervisor_hangs_up(run, tmp_path):
    async def main(client, children):
        client.start()
        (pid,) = client.pids
        client.close()
        await children.end_unwatched(20.0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    run("channel.send(READY)\nwhile channel.recv(65536): pass\n", main)
