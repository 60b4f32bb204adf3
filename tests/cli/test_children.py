import asyncio
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from cli.supervisor.processes import by_pid as processes
from cli.supervisor.processes import children as children_module
from cli.supervisor.processes.by_pid import Process
from cli.supervisor.processes.children import Children, actor_environment, spawn_process


@pytest.fixture
def children():
    """In a process of its own: it reaps, and may kill, whatever child it has, and meshes that tests share are some."""

    def runner(main):
        async def wrapped():
            children = Children(asyncio.get_running_loop())
            try:
                async with asyncio.timeout(30):
                    await main(children)
            finally:
                children.close()

        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Whatever happens, not a line of pytest's runs here.
            try:
                asyncio.run(wrapped())
            except BaseException:  # noqa: BLE001 - the test of the parent says what it was
                os.write(writer, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            failure = said.read()
        os.waitpid(pid, 0)
        assert not failure, failure

    return runner


def ended(children, process):
    future = asyncio.get_running_loop().create_future()
    children.watch(process, future.set_result)
    return future


async def test_a_spawned_process_has_its_log_its_session_and_its_descriptors(children, tmp_path):
    reader, writer = os.pipe()
    program = "import os, sys; print(os.read(3, 9).decode(), os.getsid(0) == os.getpid()); sys.exit(3)"
    log = tmp_path / "x.log"
    log.write_text("before\n")
    process = spawn_process(["-c", program], log, {3: reader}, dict(os.environ))
    os.write(writer, b"hello")
    assert await ended(children, process) == 3
    os.close(reader)
    os.close(writer)
    assert log.read_text() == "before\nhello True\n"


async def test_signals_reach_only_watched_children(children, tmp_path):
    process = spawn_process(["-c", "import time; time.sleep(600)"], tmp_path / "log", {}, dict(os.environ))
    dead = ended(children, process)
    children.signal(process.pid, signal.SIGKILL)
    assert await dead == -9
    children.signal(process.pid, signal.SIGKILL)
    children.signal(1, signal.SIGKILL)


async def test_a_death_before_the_watch_is_not_missed(children, tmp_path):
    process = spawn_process(["-c", "import sys; sys.exit(7)"], tmp_path / "log", {}, dict(os.environ))
    await children.next_death(20.0)
    assert await ended(children, process) == 7


async def test_an_earlier_process_with_the_same_pid_is_not_taken_for_a_later_one(children, tmp_path):
    # Nobody has claimed the death of a process whose pid is another's by now.
    gone = spawn_process(["-c", "import sys; sys.exit(7)"], tmp_path / "log", {}, dict(os.environ))
    await children.next_death(20.0)
    heir = Process(gone.pid, gone.start_time + 1)
    lives = ended(children, heir)
    await asyncio.sleep(0)
    assert not lives.done()
    # Nor is the end of a later process that of the one which was watched.
    later = spawn_process(["-c", "import time; time.sleep(600)"], tmp_path / "log", {}, dict(os.environ))
    before = ended(children, Process(later.pid, later.start_time - 1))
    os.kill(later.pid, signal.SIGKILL)
    await children.next_death(20.0)
    await asyncio.sleep(0)
    assert not before.done()


@pytest.mark.parametrize("is_watched_first", [True, False])
async def test_an_end_is_told_that_no_descriptor_was_left_to_look_at(children, tmp_path, monkeypatch, is_watched_first):
    process = spawn_process(["-c", "import sys; sys.exit(7)"], tmp_path / "log", {}, dict(os.environ))
    told = [ended(children, process)] if is_watched_first else []
    monkeypatch.setattr(processes, "start_time", lambda _: None)
    await children.next_death(20.0)
    monkeypatch.undo()
    told = told or [ended(children, process)]
    assert await told[0] == 7


async def test_orphans_of_descendants_are_reaped(children, tmp_path):
    program = (
        "import os, sys, time\nif os.fork() == 0:\n    os.close(1)\n    os.read(0, 1)\n    os._exit(5)\nsys.exit(0)\n"
    )
    # A pipe as stdin, so that the grandchild outlives its parent for as long as this test wants.
    reader, writer = os.pipe()
    log = tmp_path / "log"
    process = spawn_process(["-c", f"import os; os.dup2(3, 0)\n{program}"], log, {3: reader}, dict(os.environ))
    assert await ended(children, process) == 0
    (orphan,) = own_children()
    status = ended(children, Process.of(orphan))
    os.close(reader)
    os.close(writer)
    assert await status == 5
    assert own_children() == []


def own_children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


async def test_waiting_for_a_death_that_does_not_come(children):
    await children.next_death(0.01)


def test_the_name_that_ps_shows():
    naming = "from cli.supervisor.processes.children import name_process; name_process('worker-decode-0-long')"
    program = f"{naming}; print(open('/proc/self/comm').read())"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "worker-decode-0"


async def test_the_unwatched_are_ended_with_what_they_leave(children, tmp_path):
    # A child with a child: killing the first leaves the second, which nobody has named either.
    program = "import os, time; os.fork(); time.sleep(600)"
    process = spawn_process(["-c", program], tmp_path / "log", {}, dict(os.environ))
    watched = spawn_process(["-c", "import time; time.sleep(600)"], tmp_path / "log", {}, dict(os.environ))
    dead = ended(children, watched)
    assert children.unwatched() == [process.pid]
    await children.end_unwatched(0.2)
    assert own_children() == [watched.pid]
    children.unwatch(watched.pid)
    await children.end_unwatched(0.0)
    assert own_children() == []
    assert not dead.done()


@pytest.mark.parametrize("given", ["", "/elsewhere"])
def test_actors_find_the_modules_of_a_checkout_and_none_of_the_working_directory(monkeypatch, tmp_path, given):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", given)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    monkeypatch.chdir(root)
    environment = actor_environment(1)
    assert environment["PYTHONPATH"] == os.pathsep.join(filter(None, [root, given]))
    (tmp_path / "cli.py").touch()
    program = "import cli.supervisor.processes.children as found; print(found.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() == children_module.__file__


def test_what_is_installed_is_not_put_before_the_standard_library(monkeypatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [root])
    monkeypatch.setattr(children_module, "getsitepackages", lambda: [root])
    assert not actor_environment(1)["PYTHONPATH"]
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", ["/bin"])
    assert not actor_environment(1)["PYTHONPATH"], "an importer of the installation finds them"
