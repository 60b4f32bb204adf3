"""The supervisor's end of the zygote, against stand-ins that behave badly."""

import asyncio
import contextlib
import os
import signal

import msgspec
import pytest

from cli.supervisor.forks import zygote_client
from cli.supervisor.forks.zygote import Forked, ForkFailed, ZygoteReady
from cli.supervisor.forks.zygote_client import ZygoteClient
from cli.supervisor.kept.log_files import LastLines
from cli.supervisor.processes.by_pid import STOP_SIGNALS, Process
from cli.supervisor.processes.children import Children
from cli.supervisor.processes.exits import Exits

READY = msgspec.msgpack.encode(ZygoteReady())
PREAMBLE = f"import os, socket, sys, time\nchannel = socket.socket(fileno=3)\nREADY = {READY!r}\n"
IS_ASKED = "channel.send(READY)\nchannel.recv(65536)\n"


def answering(message):
    return f"channel.send(READY)\nwhile channel.recv(65536): channel.send({msgspec.msgpack.encode(message)!r})\n"


PROGRAMS = {
    "forks": answering(Forked(number=1, pid=77, start_time=5)),
    "fails": answering(ForkFailed(number=1, reason="two threads")),
    "listens": "channel.send(READY)\nwhile channel.recv(65536): pass\n",
    "exits": "sys.exit(3)\n",
    "cannot import": "print('{}\\n\\n1\\n2')\ndef fail(): raise ImportError('no ' + 600 * 'x')\nfail()\n",
    "exits when asked": IS_ASKED + "sys.exit(3)\n",
    "leaves a child": IS_ASKED + "if os.fork() == 0:\n    time.sleep(600)\n",
    "hangs": "time.sleep(600)\n",
    "hangs when asked": IS_ASKED + "time.sleep(600)\n",
}
TIMEOUTS_S = {"hangs": 0.3, "hangs when asked": 0.5}


@pytest.fixture
def deaths():
    """What the client has told of ends."""
    return []


@pytest.fixture
def log(tmp_path):
    return tmp_path / "zygote.log"


@pytest.fixture
def families():
    """The processes that the client knows."""
    return []


@pytest.fixture
@contextlib.asynccontextmanager
async def client(request, monkeypatch, deaths, log, families):
    """One whose zygote is the real one, or of `PROGRAMS` what the test has for a parameter."""
    original, name = zygote_client.spawn_process, getattr(request, "param", None)
    if name is not None:
        command = ["-c", PREAMBLE + PROGRAMS[name]]
        monkeypatch.setattr(zygote_client, "spawn_process", lambda _, *others: original(command, *others))
    children = Children(asyncio.get_running_loop())
    families.append(children)
    for pid in children.unwatched():
        # What tests share is not this one's to end: the process that forks their commands was killed here.
        children.watch(Process.of(pid), lambda _: None)
    client = ZygoteClient(
        children,
        Exits([]),
        [],
        on_death=deaths.append,
        log=log,
        environment=dict(os.environ),
        timeout_s=TIMEOUTS_S.get(name, 20.0),
    )
    try:
        async with asyncio.timeout(30):
            yield client
    finally:
        client.close()
        # What `close` cancels ends at the loop's next turn, and with no child left nothing here waits for one.
        await asyncio.sleep(0)
        await children.end_unwatched(1.0)
        children.close()


def zygote(*names):
    return pytest.mark.parametrize("client", names, indirect=True)


def fork(client, tmp_path, line=0):
    """The process, or the reason why not."""
    future = asyncio.get_running_loop().create_future()
    client.fork(tmp_path / "w.log", line, future.set_result, lambda reason, _: future.set_result(reason))
    return future


async def until(condition):
    """Look again until it is true; what another process does can only be polled."""
    while not condition():
        await asyncio.sleep(0.01)


async def both_of(client):
    """The pids of the one that serves and of its spare, once both are there."""
    client.start()
    await until(lambda: len(client.pids) == 2)
    return client.pids


@zygote("forks")
async def test_a_pid_is_handed_on(client, tmp_path):
    assert await fork(client, tmp_path) == Process(77, 5)


@zygote("fails")
async def test_a_reason_is_handed_on(client, tmp_path):
    assert await fork(client, tmp_path) == "two threads"


@zygote("exits", "exits when asked")
async def test_one_that_dies_fails_its_requests_and_the_next_starts_another(client, tmp_path):
    assert "exit 3" in await fork(client, tmp_path)
    assert client.pids == []
    assert "exit 3" in await fork(client, tmp_path)


async def test_signals_that_end_a_host_are_not_meant_for_a_zygote_nor_its_spare(client, tmp_path, deaths):
    serving, spare = await both_of(client)
    for pid in (serving, spare):
        for number in STOP_SIGNALS:
            os.kill(pid, number)
    assert isinstance(await fork(client, tmp_path), Process)
    os.kill(serving, signal.SIGKILL)
    await until(lambda: client.pids[:1] == [spare] and len(client.pids) == 2)
    assert isinstance(await fork(client, tmp_path), Process)
    assert [end.cause for end in deaths] == ["SIGKILL"]


@zygote("exits", "cannot import")
async def test_the_last_lines_of_its_log_are_told_and_no_earlier_ones(client, tmp_path, log):
    log.write_text("of an earlier one\n")
    for _ in range(2):
        reason = await fork(client, tmp_path)
        told = f"the zygote ended: exit {{0}}, see {log}"
        assert reason in (told.format(3), f"{told.format(1)} (last lines: ...{400 * 'x'})")


async def test_last_lines_are_few_and_none_of_an_actors_own(tmp_path):
    log = tmp_path / "x.log"
    last = LastLines(log)
    assert last.added_to("exit 1") == "exit 1", "nothing was written"
    log.write_text('before\n  File "a.py", line 1\n    import b\n    ^^^^^^^^\n\nImportError: no b\n{"event": "x"}\n')
    assert last.added_to("exit 1") == 'exit 1 (last lines: File "a.py", line 1 | import b | ImportError: no b)'
    last = LastLines(log)
    log.write_text("cut, then this\n")
    assert last.added_to("exit 1") == "exit 1 (last lines: cut, then this)"


async def test_a_killed_zygote_is_followed_by_its_spare_and_that_one_has_a_spare_too(client, tmp_path, deaths):
    await both_of(client)
    # More of them one after the other than a stack that grew each time would hold is for the soak to show.
    for _ in range(3):
        serving, spare = client.pids
        os.kill(serving, signal.SIGKILL)
        await until(lambda spare=spare: client.pids[:1] == [spare] and len(client.pids) == 2)
        assert isinstance(await fork(client, tmp_path), Process)
        # A time would tell nothing: a fork takes 18 ms on a busy machine, and importing nothing 15.
        assert client.pids[0] == spare, "it was imported again"
    assert [end.foreign for end in deaths] == [True] * 3


async def test_a_killed_spare_is_replaced(client):
    serving, spare = await both_of(client)
    os.kill(spare, signal.SIGKILL)
    await until(lambda: len(client.pids) == 2 and spare not in client.pids)
    assert client.pids[0] == serving


async def test_both_killed_at_once_are_started_anew_and_what_was_asked_fails_by_a_foreign_hand(client, tmp_path):
    first = await both_of(client)
    failed = asyncio.get_running_loop().create_future()
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    client.fork(tmp_path / "w.log", 0, failed.set_result, lambda _, foreign: failed.set_result(foreign))
    assert await failed is True
    assert not set(first) & set(await both_of(client))


@zygote("leaves a child")
async def test_an_actor_that_nobody_heard_of_ends_with_its_zygote(client, tmp_path, families):
    assert "exit 0" in await fork(client, tmp_path)
    assert families[0].unwatched() == []


@pytest.mark.parametrize(
    ("client", "failed"),
    [("hangs", "was not ready within start_timeout_s (0.3 s)"),
     ("hangs when asked", "did not answer within start_timeout_s (0.5 s)")],
    indirect=["client"],
)  # fmt: skip
async def test_one_that_hangs_is_killed_which_is_not_a_foreign_kill_and_says_for_which_setting(
    client, tmp_path, deaths, failed
):
    reason = await fork(client, tmp_path)
    assert reason.startswith(f"the zygote ended: it {failed} and was killed, see ")
    assert not deaths[-1].foreign
    assert deaths[-1].cause == "SIGKILL"


@zygote("hangs")
async def test_closing_fails_what_waits(client, tmp_path):
    future = fork(client, tmp_path)
    client.close()
    assert await future == "the supervisor stops"


@zygote("exits when asked")
async def test_closing_fails_what_a_dead_one_was_asked_and_what_is_asked_later(
    client, tmp_path, deaths, families, monkeypatch
):
    with monkeypatch.context() as patch:
        # As if unreported forks of the dead one took their time to end.
        patch.setattr(families[0], "end_unwatched", lambda _: asyncio.Event().wait())
        asked = fork(client, tmp_path)
        await until(lambda: deaths)
        client.close()
        assert await asked == "the supervisor stops"
        assert await fork(client, tmp_path) == "the supervisor stops"
    assert client.pids == []


@zygote("exits")
async def test_one_found_dead_before_closing_and_told_afterwards_is_no_death(client, deaths, families, monkeypatch):
    reap, told = families[0]._reap, []
    monkeypatch.setattr(families[0], "_reap", lambda: None)
    monkeypatch.setattr(families[0], "unwatch", told.append)
    client.start()
    pids = client.pids
    client.close()
    assert told == pids
    await until(lambda: os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT))
    reap()
    assert deaths == []


@zygote("listens")
async def test_it_ends_when_the_supervisor_hangs_up(client, families):
    client.start()
    (pid,) = client.pids
    client.close()
    await families[0].end_unwatched(20.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
