"""What the owner of a mesh's processes refuses before anything happens."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from cli.plan.settings import Settings, SupervisionSettings
from cli.plan.topology import ActorLaunch
from cli.protocol import RestartActors, Restarting
from cli.supervisor import mesh_directory
from cli.supervisor.actor import SupervisorActor
from cli.supervisor.keeper import Listeners, ProcessKeeper
from cli.supervisor.mesh_directory import MeshDirectory, StartError
from cli.supervisor.refusals import NotGiven, NotRecordable
from mesh.address import Address
from mesh.membership.proof import HostSecret
from mesh.membership.view import DRAINING, READY
from mesh.supervision.events import Beat, Begin, Spawned
from tests.cli.manifests import manifest


@pytest.fixture(autouse=True)
def _at_the_beginning_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs begin at 1."""
    monkeypatch.setattr(mesh_directory.time, "time", lambda: 0.0)


@pytest.fixture
@contextlib.asynccontextmanager
async def keeper(directory: MeshDirectory) -> AsyncIterator[ProcessKeeper]:
    """One actor, ready as the core sees it; no process stands behind it."""
    topology = Mock(
        actors=[ActorLaunch(actor_id="gateway-0", role="gateway", kind="gateway", config={}, start="fork")],
        preloads=(),
        num_threads=1,
        settings=Settings(supervision=SupervisionSettings()),
    )
    loop = asyncio.get_running_loop()
    record = Mock(ctx=Mock(now=loop.time, later=loop.call_later))
    listeners = Listeners(dead=Mock(), drained=Mock(), ready=Mock(), stopped=Mock(), member=Mock())
    secret = HostSecret.draw("m", "", ["gateway-0"], ())
    keeper = ProcessKeeper(topology, directory, Mock(), record, listeners, 0, secret)
    keeper.core.handle(Begin(), 0.0)
    keeper.core.handle(Spawned("gateway-0", 1), 0.0)
    keeper.core.handle(Beat("gateway-0", 1, True), 0.0)
    keeper._actors["gateway-0"].process = Mock(pid=os.getpid())
    yield keeper
    keeper.close()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_restart_is_refused_before_an_actor_ends_whose_next_epoch_cannot_be_recorded(
    keeper: ProcessKeeper, directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = keeper.core.watches["gateway-0"]
    with monkeypatch.context() as patch:
        patch.setattr(mesh_directory, "replace_file", full)
        with pytest.raises(NotRecordable, match="No space left"):
            keeper.restart(["gateway"], stay_away=False)
        question = Mock(message=RestartActors(names=["gateway"], stay_away=False))
        SupervisorActor(keeper, 1).on_ask(question)
        code, text = question.fail.call_args.args
        assert (code, str(directory.path) in text) == ("not_recordable", True)
        assert (watch.state, watch.epoch) == (READY, 1), "it goes on as it was"
    question = Mock(message=RestartActors(names=["gateway"], stay_away=False))
    SupervisorActor(keeper, 1).on_ask(question)
    question.reply.assert_called_once_with(Restarting(epochs={"gateway-0": 1}))
    assert watch.state == DRAINING, "there is room again"


async def test_on_a_full_disk_who_died_comes_back_and_it_is_said(
    keeper: ProcessKeeper, directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.issue("gateway-0", 1)
    monkeypatch.setattr(Path, "write_bytes", full)
    forked = Mock()
    keeper._starter = forked
    keeper._exited(Address("gateway-0", 1), -signal.SIGKILL)
    while not forked.start.called:
        await asyncio.sleep(0.01)
    assert forked.start.call_args.args[1] == 2
    assert MeshDirectory("m").epochs() == {"gateway-0": 2}, "no later supervisor issues it again"
    told = [call.args[0] for call in keeper._record.trouble.call_args_list]
    assert any("no room in" in line and "make room" in line for line in told)


async def test_a_manifest_is_written_again_only_if_it_is_not_what_was_written(
    keeper: ProcessKeeper, directory: MeshDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, path = keeper._record.trouble, directory.path / "manifest.json"
    keeper.manifest.look()
    assert not path.exists(), "there is no mesh yet"
    keeper.manifest.begin(manifest(directory))
    written = path.stat().st_ino
    keeper.manifest.look()
    assert path.stat().st_ino == written
    for damage in (lambda: path.write_text("{"), path.unlink, lambda: path.write_text("{}")):
        damage()
        keeper.manifest.look()
        assert directory.read_manifest() == manifest(directory)
    assert told.call_count == 3
    with monkeypatch.context() as patch:
        patch.setattr(mesh_directory, "replace_file", full)
        path.unlink()
        for _ in range(3):
            keeper.manifest.look()
        assert told.call_count == 4, "that there is no room is said once"
    keeper.manifest.look()
    assert directory.read_manifest() == manifest(directory)


async def test_a_restart_that_replaces_a_damaged_record_of_epochs_says_so(
    keeper: ProcessKeeper, directory: MeshDirectory
) -> None:
    record = directory.path / "epochs.json"
    record.write_text("{")
    keeper.restart(["gateway"], stay_away=False)
    record.write_text("{")
    keeper._starter = Mock()
    keeper._exited(Address("gateway-0", 1), 0)
    told = [call.args[0] for call in keeper._record.trouble.call_args_list]
    assert [line.startswith(f"{record} is damaged (") for line in told] == [True, True]


async def test_a_core_that_fails_costs_one_event_and_not_the_mesh(keeper: ProcessKeeper) -> None:
    ctx = keeper._record.ctx
    # A pid that nobody knows any more: the signal cannot be sent, and Terminate fails half-way.
    kept = keeper._actors["gateway-0"]
    process, kept.process = kept.process, None
    keeper.restart(["gateway"], stay_away=True)
    ctx.metrics.count.assert_called_once_with("mesh_core_failures_total", core="supervision")
    assert (ctx.end.called, keeper._listeners.stopped.called) == (False, False)
    # Nor is the deadline lost with the event: who does not end is killed when it is over.
    assert keeper._timer._handle is not None
    kept.process = process
    keeper.stop("SIGTERM", force=True)
    keeper._children.signal.assert_called_once_with(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("known", "next_epoch"), [(1_700_000_000, 1_700_000_001), (1 << 60, 2)])
async def test_who_was_refused_for_its_epoch_comes_again_above_the_one_that_is_known(
    keeper: ProcessKeeper, directory: MeshDirectory, known: int, next_epoch: int
) -> None:
    """One that no file could hold is somebody's nonsense, and not taken over."""
    forked = keeper._starter = Mock()
    directory.write_error(Address("gateway-0", 1), StartError("replaced", known))
    keeper._exited(Address("gateway-0", 1), 1)
    while not forked.start.called:
        await asyncio.sleep(0.01)
    assert forked.start.call_args.args[1] == next_epoch
    assert directory.epochs() == {"gateway-0": next_epoch}


async def test_the_mesh_hears_who_stays_away_before_he_is_asked_to_end(keeper: ProcessKeeper) -> None:
    keeper._starter = Mock()
    order = Mock()
    order.attach_mock(keeper._listeners.drained, "drained")
    order.attach_mock(keeper._children.signal, "signal")
    keeper.restart(["gateway"], stay_away=True)
    pid = keeper._actors["gateway-0"].process.pid
    assert order.mock_calls == [call.drained({"gateway-0": 1}), call.signal(pid, signal.SIGTERM)]
    keeper._exited(Address("gateway-0", 1), 0)
    keeper.beat(Address("gateway-0", 1), READY, "")
    assert len(order.mock_calls) == 2, "it is drained now, which is nothing new"
    keeper.restart(["gateway"], stay_away=False)
    assert order.mock_calls[2:] == [call.drained({})]


async def test_who_asks_for_a_proof_that_is_never_given_is_told_why_and_no_more(keeper: ProcessKeeper) -> None:
    # What to do instead is for the command to say.
    with pytest.raises(NotGiven) as caught:
        keeper.prove("gateway-0", 2, "gateway")
    assert caught.value.message == "only the supervisor may start gateway-0 as gateway"
