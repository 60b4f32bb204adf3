"""Actors as processes: ready, asked, drained, forced, killed, orphaned."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mesh.address import Address
from mesh.errors import ActorFailed, CoreFailed, DrainFailed, NotReadyInTime, PeerLost
from mesh.run import run_actor
from mesh.runtime.driver import CoreDriver
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.supervisor_line import ActorEnd, SupervisorEnd
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from tests.mesh.mesh_under_test import QUICK, Recorder, Say, until

pytestmark = pytest.mark.process

PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from threading import Thread
    sys.path.insert(0, {root!r})
    from tests.mesh.mesh_under_test import QUICK, Recorder
    from mesh.address import Address
    from mesh.run import run_actor
    from mesh.runtime.run_directory import RunDirectory
    from nodes.registry.actor import RegistryActor

    actor_id, epoch, path = sys.argv[1:]
    directory = RunDirectory(Path(path))
    actor = RegistryActor(directory, lease_s=1.0) if actor_id == "registry" else Recorder()
    if actor_id == "busy":
        Thread(target=exec, args=("while True: pass",), daemon=True).start()
    sys.exit(run_actor(actor, Address(actor_id, int(epoch)), run_directory=directory, options=QUICK))
    """
)


class Processes:
    def __init__(self, path):
        self.directory = RunDirectory(path)
        self.all = []

    def start(self, actor_id, epoch=1):
        program = PROGRAM.format(root=str(Path(__file__).parents[2]))
        arguments = [sys.executable, "-c", program, actor_id, str(epoch), str(self.directory.path)]
        environment = {**os.environ, "KVMESH_LOG_FORMAT": "json"}
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
        self.all.append(process)
        return process

    def wait_for(self, process, event):
        """Read the process's log up to an event; its line."""
        for line in process.stderr:
            entry = json.loads(line)
            if entry["event"] == event:
                return entry
        raise AssertionError(f"the log ended before {event}")

    def stop(self):
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stderr.close()


@pytest.fixture
def processes(short_path):
    started = Processes(short_path)
    started.directory.create()
    yield started
    started.stop()


def asker(directory):
    actor = Recorder()
    actor.joins = True
    transport = ZeroMQTransport(ZeroMQOptions(run_directory=directory))
    return ActorSystem(actor, Address("asker", 1), transport, directory.bootstrap(), QUICK)


def test_a_process_that_computes_interrupts_nobody_and_an_idle_one_does(processes):
    processes.wait_for(processes.start("registry"), "joined")
    busy, idle = processes.start("busy"), processes.start("idle")
    for process in (busy, idle):
        processes.wait_for(process, "joined")
    deadline = time.monotonic() + 20
    while os.sched_getscheduler(busy.pid) != os.SCHED_BATCH:
        assert time.monotonic() < deadline, "not by a heartbeat"
        time.sleep(0.05)
    assert {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{busy.pid}/task")} == {os.SCHED_BATCH}
    # It was busy with its start, too, and has to be seen idle first.
    while os.sched_getscheduler(idle.pid) != os.SCHED_OTHER:
        assert time.monotonic() < deadline, "not by a heartbeat"
        time.sleep(0.05)


def test_processes_join_answer_die_and_return(processes, run):
    registry = processes.start("registry")
    processes.wait_for(registry, "joined")
    recorder = processes.start("r")
    joined = processes.wait_for(recorder, "joined")
    assert joined["pid"] == recorder.pid
    assert joined["control"].endswith("/s/r.1.c")

    async def main():
        system = asker(processes.directory)
        await system.start()
        try:
            await live_through(system)
        finally:
            await system.stop()

    async def live_through(system):
        ask = system.actor.ctx.ask
        await until(lambda: system.registration.view.get("r"))
        assert (await ask("r", Say(text="hi"), timeout_s=5)).message == Say(text="hi")
        pending = asyncio.create_task(ask("r", Say(text="silence"), timeout_s=60))
        await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        start = loop.time()
        recorder.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost):
            await pending
        assert loop.time() - start < 1
        # The registry dies too; the mesh works on, and both return with new epochs.
        registry.send_signal(signal.SIGKILL)
        processes.start("registry", 2)
        processes.start("r", 2)
        await until(lambda: (m := system.registration.view.get("r")) and m.address == Address("r", 2), 20)
        await until(lambda: system.registration.view.get("registry").epoch == 2, 20)
        assert (await ask("r", Say(text="hi"), timeout_s=5)).sender == Address("r", 2)

    run(main)
    for process in (processes.all[3], processes.all[2]):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    left = sorted(path.name for path in processes.directory.sockets.iterdir())
    assert left == ["r.1.c", "r.1.d", "registry.1.c", "registry.1.d"]  # of those killed; the next `up` sweeps


class Kills(Recorder):
    """Has itself told to stop, by whatever the test says."""

    joins = False

    def __init__(self, end, drain_s=0.0):
        super().__init__()
        self.end = end
        self.drain_s = drain_s
        self.drained = False

    async def start(self):
        self.ctx.later(0.02, self.end, self)
        # Ten times what any of the ends takes on a busy machine.
        self.ctx.later(10.0, self.is_late)

    def is_late(self):
        self.drained = None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)

    async def drain(self):
        await asyncio.sleep(self.drain_s)
        self.drained = True


class Joins(Kills):
    joins = True


class NeverStarts(Kills):
    async def start(self):
        await super().start()
        await asyncio.Event().wait()


class FailsToStart(Kills):
    async def start(self):
        raise RuntimeError("it cannot start")


class FailsToDrain(Kills):
    async def drain(self):
        raise OSError("it cannot drain")


def test_in_this_process(short_path):
    """All ways to end, where coverage and a debugger can see them."""
    reading, writing = os.pipe()
    directory = RunDirectory(short_path)

    def here(end, actor=None, **settings):
        actor = actor or Kills(end)
        code = run_actor(actor, Address("x", 1), run_directory=directory, options=QUICK, **settings)
        assert list(directory.sockets.iterdir()) == []
        return code, actor.drained

    def terminate(actor):
        os.kill(os.getpid(), signal.SIGTERM)

    def twice(actor):
        os.kill(os.getpid(), signal.SIGINT)
        actor.ctx.later(0.02, terminate, actor)

    def orphaned(actor):
        os.write(writing, b"x")
        actor.ctx.later(0.02, os.close, writing)

    def superseded(actor):
        actor.ctx.end("superseded")

    def fails(actor):
        driver = CoreDriver(actor, "told", lambda event, now: [event], {}.__getitem__)
        driver.feed("an event")

    before = signal.getsignal(signal.SIGTERM)
    try:
        # Nobody takes it in, or it has not started: what it waits for may never come.
        assert here(superseded, Joins(superseded)) == (0, False)
        assert here(superseded, NeverStarts(superseded)) == (0, False)
        assert here(terminate, NeverStarts(terminate)) == (0, False)
        assert here(terminate) == (0, True)
        assert here(superseded) == (0, False)
        assert here(orphaned, supervisor_fd=reading) == (0, False)
        assert here(terminate, Kills(terminate, 60.0), drain_timeout_s=0.05) == (1, False)
        assert here(twice, Kills(twice, 60.0)) == (1, False)
        assert here(terminate, Joins(terminate)) == (0, True)
        with pytest.raises(CoreFailed, match=r"its core told failed \(KeyError\)") as failed:
            here(fails)
        assert failed.value.core == "told"
        with pytest.raises(ActorFailed, match="the device is broken"):
            here(lambda actor: actor.ctx.fail("the device is broken"))
        with pytest.raises(DrainFailed, match=r"the drain of x#1 failed \(OSError\)"):
            here(terminate, FailsToDrain(terminate))
        with pytest.raises(RuntimeError, match="it cannot start"):
            here(terminate, FailsToStart(terminate))
    finally:
        os.close(reading)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_supervisors_end_that_breaks_is_its_end(short_path):
    directory = RunDirectory(short_path)
    ours, theirs = socket.socketpair()

    def break_it(actor):
        theirs.send(b"never read")
        # What was not read makes the other end see a reset and not an end of file.
        ours.close()

    with ours, theirs:
        actor = Kills(break_it)
        settings = {"run_directory": directory, "options": QUICK, "supervisor_fd": theirs.fileno()}
        assert run_actor(actor, Address("x", 1), **settings) == 0
        assert not actor.drained


class Waits(Recorder):
    """Is told things once it has started, one after the other, and notes when it was to drain."""

    joins = False

    def __init__(self, *told, drain_s=0.0):
        super().__init__()
        self.told = told
        self.drain_s = drain_s
        self.drained_after = None

    async def start(self):
        for number, tell in enumerate(self.told, 1):
            self.ctx.later(0.05 * number, self.tell, number, tell)

    def tell(self, number, tell):
        self.num_told = number
        tell()

    async def drain(self):
        self.drained_after = self.num_told
        await asyncio.sleep(self.drain_s)


def signals(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture
def line():
    line = SupervisorEnd()
    yield line
    line.close()


def supervised(actor, directory, line, **settings):
    descriptor = line.theirs.fileno()
    return run_actor(
        actor, Address("x", 1), run_directory=directory, options=QUICK, supervisor_fd=descriptor, **settings
    )


def test_a_supervised_actor_passes_signals_up_and_ends_by_its_supervisors_word(short_path, line):
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM]
    actor = Waits(*map(signals, numbers), lambda: line.finish(30.0), signals(signal.SIGTERM), drain_s=0.2)
    assert supervised(actor, RunDirectory(short_path), line) == 0
    assert actor.drained_after == 5, "a signal was taken for the supervisor's word"
    passed_up = []
    assert line.read(passed_up.append)
    assert passed_up == [*numbers, signal.SIGTERM]


def test_a_signal_at_the_moment_of_the_supervisors_word_changes_nothing(short_path, line):
    actor = Waits(lambda: (signals(signal.SIGTERM)(), line.finish(30.0), signals(signal.SIGTERM)()), drain_s=0.2)
    assert supervised(actor, RunDirectory(short_path), line) == 0
    assert actor.drained_after == 1


def test_a_supervisor_gives_less_time_than_the_actor_has_and_never_more(short_path, line):
    settings = {"directory": RunDirectory(short_path), "line": line}
    assert supervised(Waits(lambda: line.finish(0.05), drain_s=60.0), drain_timeout_s=60.0, **settings) == 1
    assert supervised(Waits(lambda: line.finish(60.0), drain_s=60.0), drain_timeout_s=0.05, **settings) == 1


def test_by_a_pipe_nothing_can_be_passed_up_so_that_a_signal_is_the_actors_own(short_path):
    reading, writing = os.pipe()
    try:
        actor = Waits(signals(signal.SIGTERM))
        directory = RunDirectory(short_path)
        assert run_actor(actor, Address("x", 1), run_directory=directory, options=QUICK, supervisor_fd=reading) == 0
        assert actor.drained_after == 1
    finally:
        os.close(reading)
        os.close(writing)


def test_an_order_comes_first_and_whole_and_last_words_stay_until_they_are_read(line):
    actor = ActorEnd(line.theirs.fileno())
    with pytest.raises(OSError, match="65537 bytes; at most 65536 fit"):
        line.give_order(bytes(65537))
    line.give_order(bytes(65536))
    line.finish(2.5)
    assert actor.order() == bytes(65536)
    assert actor.read() == [2.5]
    actor.pass_up(signal.SIGTERM)
    actor.say_last(b"a core of it failed")
    line.theirs.close()
    passed_up = []
    assert not line.read(passed_up.append), "it is gone"
    assert (passed_up, line.last_words) == ([signal.SIGTERM], b"a core of it failed")
    actor.say_last(b"nobody hears this")


def test_frames_of_a_later_release_are_left_and_a_full_line_has_said_enough(line):
    actor = ActorEnd(line.theirs.fileno())
    os.write(line.fileno(), b"something new")
    assert actor.read() == []
    line.finish(2.5)
    line.finish(1.5)
    assert actor.read() == [2.5, 1.5]
    passed_up = []
    assert all(actor.pass_up(signal.SIGTERM) for _ in range(5_000)), "a full line is no reason to end"
    assert line.read(passed_up.append)
    os.write(line.theirs.fileno(), b"\xff")
    assert line.read(passed_up.append), "no signal has that number"
    assert {*passed_up} == {signal.SIGTERM}
    line.theirs.close()
    assert not line.read(passed_up.append)
    line.finish(1.0)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may(short_path):
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, wanted), hard))
        stops = Kills(lambda actor: os.kill(os.getpid(), signal.SIGTERM))
        assert run_actor(stops, Address("x", 1), run_directory=RunDirectory(short_path), options=QUICK) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Loads(Kills):
    """Takes `start_s` for its start, and says how far it is as long as it `goes_on`."""

    def __init__(self, start_s, *, goes_on):
        super().__init__(lambda actor: None)
        self.start_s, self.goes_on = start_s, goes_on

    def progress(self):
        return f"loading, {self.ctx.now()}" if self.goes_on else "loading"

    async def start(self):
        await asyncio.sleep(self.start_s)
        self.ctx.later(0.3, os.kill, os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("actor", [NeverStarts(lambda actor: None), Loads(60.0, goes_on=False)])
def test_a_start_that_makes_no_progress_is_over_at_its_time(short_path, actor):
    with pytest.raises(NotReadyInTime, match=r"x#1 was not ready within 0.1 s: see what its log says"):
        run_actor(actor, Address("x", 1), run_directory=RunDirectory(short_path), options=QUICK, start_timeout_s=0.1)


def test_one_that_is_not_admitted_says_so(short_path):
    with pytest.raises(NotReadyInTime, match=r"x#1 was not ready within 0.2 s: "):
        run_actor(
            Joins(lambda actor: None), Address("x", 1), run_directory=RunDirectory(short_path), options=QUICK,
            start_timeout_s=0.2,
        )  # fmt: skip


@pytest.mark.parametrize("actor", [Loads(0.6, goes_on=True), Loads(0.0, goes_on=False)])
def test_one_that_makes_progress_or_is_ready_is_not_ended(short_path, actor):
    run = RunDirectory(short_path)
    assert run_actor(actor, Address("x", 1), run_directory=run, options=QUICK, start_timeout_s=0.1) == 0
