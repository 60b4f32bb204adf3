"""Signals reach the process that was recorded, and no other one; garbage and slow readers reach who listens."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from cli.bench.client import Server
from cli.chaos.blows import HTTP, Blow, garbage
from cli.chaos.striker import Striker
from cli.client import RunningMesh
from cli.commands.chaos import processes
from cli.supervisor.processes.by_pid import Process, start_time
from mesh.address import Endpoint
from mesh.testing.ports import free_port
from tests.cli.manifests import manifest, record
from tests.process.conftest import wait_until

SERVER = Server("127.0.0.1", 1)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def striker(*records, server=SERVER) -> Striker:
    return Striker(lambda: records, server, "tiny")


def test_who_was_recorded_is_killed(stranger) -> None:
    struck = striker(record(stranger)).signal("a", signal.SIGKILL)
    assert struck is not None
    assert stranger.wait(10) == -signal.SIGKILL
    assert struck.is_dead
    struck.send(signal.SIGKILL)
    struck.close()


def test_a_pid_that_is_anothers_by_now_gets_nothing(stranger) -> None:
    started = start_time(stranger.pid)
    assert started is not None
    for other in (started - 1, started + 1, 0):
        assert striker(record(stranger, start_time=other)).signal("a", signal.SIGKILL) is None
    assert striker(record(stranger)).signal("b", signal.SIGKILL) is None, "nobody has that id"
    assert striker(record(Process.of(os.getpid()))).signal("a", signal.SIGKILL) is None, "that is this command itself"
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(10)
    assert striker(record(stranger, start_time=started)).signal("a", signal.SIGKILL) is None


def test_whoever_is_stopped_is_woken_by_name_or_all_together(start_stranger) -> None:
    first, second = start_stranger(), start_stranger()
    of_two = striker(record(first), record(second, actor_id="b"))
    one, other = of_two.signal("a", signal.SIGSTOP), of_two.signal("b", signal.SIGSTOP)
    assert one is not None
    assert other is not None
    wait_until(lambda: state(first.pid) == state(second.pid) == "T", "both are stopped")
    of_two.wake(one)
    wait_until(lambda: state(first.pid) != "T", "it is woken")
    assert state(second.pid) == "T"
    of_two.wake_all()
    wait_until(lambda: state(second.pid) != "T", "the other one too")
    # Its pid is nobody's now, and is not asked for again.
    of_two.signal("a", signal.SIGSTOP)
    first.kill()
    first.wait(10)
    of_two.wake_all()


def test_a_mesh_that_has_ended_has_no_processes_even_if_another_has_its_name(directory, start_stranger) -> None:
    supervisor, other, actor = start_stranger(), start_stranger(), start_stranger()
    ours = manifest(directory, supervisor, processes=[record(actor)])
    directory.write_manifest(ours)
    mesh = RunningMesh(directory, ours)
    assert [one.pid for one in processes(mesh)] == [actor.pid]
    directory.write_manifest(manifest(directory, other, processes=[record(actor)]))
    assert processes(mesh) == []
    directory.remove_manifest()
    assert processes(mesh) == []


@contextlib.asynccontextmanager
async def listening(family: int, address):
    """A server that keeps what each connection has sent, until all of them have ended."""
    got: list[bytearray] = []
    open_ones = asyncio.TaskGroup()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                own += data
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(bytearray())
        open_ones.create_task(take(reader, writer, got[-1]))

    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        async with open_ones, await asyncio.start_server(serve, sock=listener):
            yield got


@pytest.mark.parametrize("seed", [2, 3])
async def test_garbage_arrives_at_one_of_an_actors_sockets(tmp_path, seed) -> None:
    paths = [str(tmp_path / "c"), str(tmp_path / "d")]
    async with listening(socket.AF_UNIX, paths[0]) as control, listening(socket.AF_UNIX, paths[1]) as data:
        blow = Blow("garbage", "a", seed=seed)
        assert await striker().throw(blow, Endpoint(f"ipc://{paths[0]}", f"ipc://{paths[1]}"))
        sent = garbage(seed, http=False)
        assert [bytes(one) for one in control + data] == [sent]
        assert len(data) == seed % 2
    for endpoint in (Endpoint("ipc:///none", "ipc:///none"), Endpoint("tcp://10.0.0.1:1", "tcp://10.0.0.1:2"), None):
        assert not await striker().throw(blow, endpoint), "nobody listens, or it is another host's"


async def test_http_gets_garbage_and_clients_that_hardly_write_or_read() -> None:
    port = free_port()
    async with listening(socket.AF_INET, ("127.0.0.1", port)) as got:
        strikes = striker(server=Server("127.0.0.1", port))
        assert await strikes.throw(Blow("garbage", HTTP, seed=5), None)
        assert bytes(got[0]) == garbage(5, http=True)
        assert await strikes.read_slowly(Blow("slow", HTTP, lasts_s=0.5, seed=1))
        lengths = [len(one) for one in got[1:]]
        assert len(lengths) == 8
        assert sum(length < 20 for length in lengths) == 4, "some never come to the end"
        assert len({bytes(one) for one in got[1:] if len(one) >= 20}) == 1
    closed = striker(server=Server("127.0.0.1", free_port()))
    assert not await closed.throw(Blow("garbage", HTTP, seed=5), None)
    assert not await closed.read_slowly(Blow("slow", HTTP, lasts_s=0.5, seed=1))
