"""What the owner of a mesh's processes refuses before anything happens."""

import asyncio
import contextlib
import errno
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock, call

import msgspec
import pytest

from cli.exit_codes import ExitCode
from cli.plan.settings import Settings, SupervisionSettings
from cli.plan.topology import ActorLaunch
from cli.protocol import RestartActors, Restarting
from cli.supervisor import keeper as keeper_module
from cli.supervisor.actor import SupervisorActor
from cli.supervisor.forks.role import LastWords, RoleRun
from cli.supervisor.keeper import Listeners, ProcessKeeper
from cli.supervisor.kept import mesh_directory
from cli.supervisor.kept.log_files import LastLines
from cli.supervisor.kept.manifest_file import ManifestFile
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.kept_actor import KeptActor
from cli.supervisor.processes.by_pid import Process
from cli.supervisor.told.refusals import NotGiven, NotRecordable
from mesh.address import Address, Endpoint
from mesh.membership.proof import HostSecret
from mesh.membership.view import DRAINING, READY, Member
from mesh.runtime.supervisor_line import ActorEnd, SupervisorEnd
from mesh.supervision.core import Watch
from mesh.supervision.events import SPAWNING, Policy, StartOverdue, Supervised
from mesh.supervision.restarts import Restarts
from tests.cli.manifests import manifest
from tests.mesh.recorded_call import RecordedCall


@pytest.fixture(autouse=True)
def _at_the_beginning_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs begin at 1."""
    monkeypatch.setattr(mesh_directory.time, "time", lambda: 0.0)


class Kept:
    """A keeper of one actor that is ready. Who forks it, watches it and hears of it is played."""

    def __init__(self, directory: MeshDirectory, zygote: Mock) -> None:
        topology = Mock(
            actors=[ActorLaunch(actor_id="gateway-0", role="gateway", kind="gateway", config={}, start="fork")],
            preloads=(),
            num_threads=1,
            settings=Settings(supervision=SupervisionSettings(drain_timeout_s=0.2)),
            start_timeout_s=60.0,
        )
        loop = asyncio.get_running_loop()
        self.zygote, self.children = zygote, Mock()
        self.record = Mock(ctx=Mock(now=loop.time, later=loop.call_later))
        self.listeners = Listeners(**{name: Mock() for name in Listeners.__struct_fields__})
        self.listeners.unserved.return_value = "empty"
        secret = HostSecret.draw("m", "", ["gateway-0"], ())
        self.keeper = ProcessKeeper(topology, directory, self.children, self.record, self.listeners, secret)
        self.keeper.begin(manifest(directory))
        _, line, spawned, _ = zygote.fork.call_args.args
        self.line = ActorEnd(os.dup(line))
        self.ordered = order_of(self.line)
        spawned(Process.of(os.getpid()))
        self.keeper.beat(Address("gateway-0", 1), READY, "")
        zygote.reset_mock()

    @property
    def watch(self) -> Watch:
        return self.keeper.core.watches["gateway-0"]

    @property
    def troubles(self) -> list[str]:
        return [one.args[0] for one in self.record.trouble.call_args_list]

    def ends(self, status: int) -> None:
        """The actor's process, as whoever watches it says."""
        _, exited = self.children.watch.call_args.args
        exited(status)

    async def next_epoch(self) -> int:
        """Of the incarnation that is started next."""
        while not self.zygote.fork.called:
            await asyncio.sleep(0.01)
        return order_of(ActorEnd(self.zygote.fork.call_args.args[1])).epoch


def order_of(line: ActorEnd) -> RoleRun:
    return msgspec.msgpack.decode(line.order(), type=RoleRun)


@pytest.fixture
@contextlib.asynccontextmanager
async def kept(directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    zygote = Mock()
    monkeypatch.setattr(keeper_module, "ZygoteClient", lambda *_, **__: zygote)
    kept = Kept(directory, zygote)
    yield kept
    kept.keeper.close()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_restart_is_refused_before_an_actor_ends_whose_next_epoch_cannot_be_recorded(
    kept: Kept, directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = RecordedCall(RestartActors(names=["gateway"], stay_away=False))
    with monkeypatch.context() as patch:
        patch.setattr(mesh_directory, "replace_file", full)
        with pytest.raises(NotRecordable, match="No space left"):
            kept.keeper.restart(["gateway"], stay_away=False)
        SupervisorActor(kept.keeper, 1).on_ask(question)  # type: ignore[arg-type]
        assert (question.answer, str(directory.path) in question.why) == ("not_recordable", True)
        assert (kept.watch.state, kept.watch.epoch) == (READY, 1), "it goes on as it was"
    SupervisorActor(kept.keeper, 1).on_ask(question)  # type: ignore[arg-type]
    assert question.answer == Restarting(epochs={"gateway-0": 1})
    assert kept.watch.state == DRAINING, "there is room again"


async def test_epochs_go_on_over_restarts_of_the_mesh(kept: Kept, directory: MeshDirectory) -> None:
    again = Kept(directory, kept.zygote)
    assert (kept.watch.epoch, again.watch.epoch) == (1, 2)
    again.keeper.close()


async def test_on_a_full_disk_who_died_comes_back_and_it_is_said(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)
    kept.ends(-signal.SIGKILL)
    assert await kept.next_epoch() == 2
    assert MeshDirectory("m").epochs() == {"gateway-0": 2}, "no later supervisor issues it again"
    assert any("no room in" in line and "make room" in line for line in kept.troubles)


def test_a_manifest_is_written_again_only_if_it_is_not_what_was_written(
    directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, path = Mock(), directory.path / "manifest.json"
    file = ManifestFile(directory, record)
    file.look()
    assert not path.exists(), "there is no mesh yet"
    file.begin(manifest(directory))
    written = path.stat().st_ino
    file.look()
    assert path.stat().st_ino == written
    for damage in (lambda: path.write_text("{"), path.unlink, lambda: path.write_text("{}")):
        damage()
        file.look()
        assert directory.read_manifest() == manifest(directory)
    assert record.trouble.call_count == 3
    with monkeypatch.context() as patch:
        patch.setattr(mesh_directory, "replace_file", full)
        path.unlink()
        for _ in range(3):
            file.look()
        assert record.trouble.call_count == 4, "that there is no room is said once"
    file.look()
    assert directory.read_manifest() == manifest(directory)


async def test_a_restart_that_replaces_a_damaged_record_of_epochs_says_so(kept: Kept, directory: MeshDirectory) -> None:
    record = directory.path / "epochs.json"
    record.write_text("{")
    kept.keeper.restart(["gateway"], stay_away=False)
    record.write_text("{")
    kept.ends(0)
    assert [line.startswith(f"{record} is damaged (") for line in kept.troubles] == [True, True]


async def test_who_ended_its_drain_itself_because_it_took_too_long_is_said_to_have(kept: Kept) -> None:
    kept.keeper.restart(["gateway"], stay_away=False)
    kept.ends(ExitCode.TIMED_OUT)
    (died,) = [one.args[0] for one in kept.record.death.call_args_list]
    assert (died.cause, died.reason, died.is_wished) == ("not_drained_in_time", "not drained within 0.2 s", False)
    assert await kept.next_epoch() == 2


async def test_an_actors_failed_core_is_counted_by_its_supervisor(kept: Kept) -> None:
    kept.line.say_last(msgspec.msgpack.encode(LastWords("its core gateway failed", core="gateway")))
    kept.ends(1)
    kept.record.core_failure.assert_called_once_with("gateway-0", "gateway")
    kept.record.core_failure.reset_mock()
    assert await kept.next_epoch() == 2
    assert kept.watch.reason == "its core gateway failed"


@pytest.mark.parametrize("words", [b"not one", b"\x81\xa7message\x01", b""])
async def test_last_words_that_are_none_are_passed_over(kept: Kept, words: bytes) -> None:
    kept.line.say_last(words)
    kept.ends(3)
    assert await kept.next_epoch() == 2
    assert kept.watch.reason == "exit 3"


async def test_an_actor_is_told_what_to_be_by_its_line(kept: Kept) -> None:
    told = kept.ordered
    assert (told.mesh, told.role, told.actor_id, told.epoch, told.config) == ("m", "gateway", "gateway-0", 1, {})
    assert told.drain_timeout_s == 0.2
    assert told.secret is not None
    assert told.secret.supervised == ["gateway-0"]


async def test_a_core_that_fails_costs_one_event_and_not_the_mesh(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, core = kept.record.ctx, kept.keeper.core
    core.policy = msgspec.structs.replace(core.policy, end_timeout_s=0.0)
    # The word cannot be sent, and Terminate fails half-way.
    monkeypatch.setattr(SupervisorEnd, "finish", full)
    kept.keeper.restart(["gateway"], stay_away=True)
    ctx.metrics.count.assert_called_once_with("mesh_core_failures_total", core="supervision")
    assert (ctx.end.called, kept.listeners.stopped.called) == (False, False)
    # Nor is the deadline lost with the event: who does not end is killed when it is over.
    async with asyncio.timeout(2.0):
        while kept.children.signal.call_args != call(os.getpid(), signal.SIGKILL):
            await asyncio.sleep(0.01)


async def test_what_an_actor_passes_up_is_heard_and_its_end_goes_with_its_process(kept: Kept) -> None:
    kept.line.pass_up(signal.SIGTERM)
    while not kept.listeners.signalled.called:
        await asyncio.sleep(0.001)
    kept.listeners.signalled.assert_called_once_with("gateway-0", signal.SIGTERM)
    kept.keeper.restart(["gateway"], stay_away=False)
    assert kept.line.read() == [math.inf]
    kept.ends(0)
    assert kept.line.read() is None, "the supervisor has let go of it"
    assert await kept.next_epoch() == 2


async def test_an_actor_without_a_line_is_not_started_and_the_next_try_is(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keeper_module, "SupervisorEnd", full)
        kept.ends(1)
        while "no line to it can be opened" not in kept.watch.reason:
            await asyncio.sleep(0.001)
    assert await kept.next_epoch() > 2


@pytest.mark.parametrize(("known", "next_epoch"), [(1_700_000_000, 1_700_000_001), (1 << 60, 2)])
async def test_who_was_refused_for_its_epoch_comes_again_above_the_one_that_is_known(
    kept: Kept, directory: MeshDirectory, known: int, next_epoch: int
) -> None:
    """One that no file could hold is somebody's nonsense, and not taken over."""
    kept.line.say_last(msgspec.msgpack.encode(LastWords("replaced", known)))
    kept.ends(1)
    assert await kept.next_epoch() == next_epoch
    assert directory.epochs() == {"gateway-0": next_epoch}


async def test_the_mesh_hears_who_stays_away_before_he_is_asked_to_end(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Mock()
    order.attach_mock(kept.listeners.drained, "drained")
    monkeypatch.setattr(SupervisorEnd, "finish", lambda _, within_s: order.finish(within_s))
    kept.keeper.restart(["gateway"], stay_away=True)
    assert order.mock_calls == [call.drained({"gateway-0": 1}), call.finish(math.inf)]
    kept.ends(0)
    kept.keeper.beat(Address("gateway-0", 1), READY, "")
    assert len(order.mock_calls) == 2, "it is drained now, which is nothing new"
    kept.keeper.restart(["gateway"], stay_away=False)
    assert order.mock_calls[2:] == [call.drained({})]
    (told,) = kept.keeper.list_actors().actors
    assert (told.num_starts, told.num_deaths, told.num_restarts, told.num_requested_restarts) == (2, 0, 0, 1)


async def test_who_asks_for_a_proof_that_is_never_given_is_told_why_and_no_more(kept: Kept) -> None:
    # What to do instead is for the command to say.
    with pytest.raises(NotGiven) as caught:
        kept.keeper.prove("gateway-0", 2, "gateway")
    assert caught.value.message == "only the supervisor may start gateway-0 as gateway"


async def test_what_an_actor_fell_back_to_and_its_damaged_pages_are_notes(kept: Kept) -> None:
    told = {"kv-agent-1": "tcp instead of nccl: no NCCL (device_unavailable)"}
    notes: list[list[str]] = []
    for attributes in ({"fallbacks": told}, {"fallbacks": {}}, {}, {"damaged_pages": 0}, {"damaged_pages": 2}):
        kept.listeners.member.return_value = Member("gateway-0", "r", 1, Endpoint("", ""), attributes=attributes)
        notes.append(kept.keeper.list_actors().actors[0].notes)
    out = (
        "2 pages of KV are out of use, as its books disagreed about them (its log names them); "
        "`meshctl restart gateway-0` brings them back"
    )
    assert notes == [
        ["pages of kv-agent-1 come by tcp instead of nccl: no NCCL (device_unavailable)"],
        [],
        [],
        [],
        [out],
    ]


def test_why_an_actor_is_not_ready(directory: MeshDirectory) -> None:
    log = directory.log("s")
    log.write_text('{"event":"waiting","what":"the pool","why":"of another mesh"}\n')
    launch = ActorLaunch(actor_id="s", role="scheduler", kind="s", config={}, start="fork")
    watch = Watch(Supervised("s"), Restarts(Policy()), state=SPAWNING)
    kept = KeptActor(launch, watch, last_lines=LastLines(log))
    assert kept.why_unready() == "spawning, the zygote, which it is forked from, is not ready"
    watch.state, watch.reason = "starting", "exit 1"
    assert kept.why_unready() == "starting, exit 1"
    with log.open("a") as file:
        file.write('{"event":"waiting","what":"the worker","why":"unreachable"}\n{"event":"signal"}\nnoise\n')
    assert kept.why_unready() == "starting, the worker: unreachable, exit 1"
    assert KeptActor(launch, watch).why_unready() == "starting, exit 1"


async def test_a_start_that_is_overdue_is_stopped_with_the_reasons(
    directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote = Mock()
    monkeypatch.setattr(keeper_module, "ZygoteClient", lambda *_, **__: zygote)
    kept = Kept(directory, zygote)
    kept.watch.state = SPAWNING
    kept.keeper._perform(StartOverdue(("gateway-0",)))
    assert kept.keeper.core.stopping
    zygote.close.assert_called_with()
    assert kept.keeper._why_unready(()) == "not ready within start_timeout_s (60 s): empty"
    kept.keeper.close()
