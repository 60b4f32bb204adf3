"""What a supervisor writes down of each death, kill, pause and giving up."""

import os
from typing import Any

import pytest
import structlog

from cli.supervisor.processes.exits import Exit
from cli.supervisor.told.progress import Progress
from cli.supervisor.told.record import SupervisionRecord
from mesh.runtime.telemetry import Metrics
from mesh.supervision.core import Supervisor
from mesh.supervision.events import (
    Beat,
    Begin,
    Died,
    Event,
    Exited,
    Policy,
    Report,
    Restart,
    Spawned,
    SpawnFailed,
    Stop,
    Supervised,
    Tick,
)


class Written:
    """A core of two workers whose commands are recorded."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.log = structlog.get_logger()
        self.reader, writer = os.pipe()
        self.record = SupervisionRecord(Progress(writer, is_pipe=True), lambda: self, dict.fromkeys("ab", "worker"))
        twins = [Supervised(actor_id, kind="worker") for actor_id in "ab"]
        self.core = Supervisor(twins, Policy(budget=2), {})
        self.feed(Begin(), 0.0)
        for actor_id in "ab":
            self.starts(actor_id, 1, 0.0)

    def feed(self, event: Event, now: float) -> None:
        for command in self.core.handle(event, now):
            match command:
                case Died():
                    self.record.death(command)
                case Report():
                    self.record.state(command)
                case _:
                    pass

    def starts(self, actor_id: str, epoch: int, now: float) -> None:
        self.feed(Spawned(actor_id, epoch), now)
        self.feed(Beat(actor_id, epoch, ready=True), now)

    def counted(self, name: str, actor: str, **labels: str) -> float:
        role = "worker" if actor in "ab" else "zygote"
        return self.metrics.value(f"mesh_supervisor_{name}_total", actor=actor, role=role, **labels)


@pytest.fixture
def written() -> Written:
    return Written()


def events(log: list[Any], actor_id: str) -> list[str]:
    return [entry["event"] for entry in log if entry.get("peer") == actor_id]


def test_every_death_restart_pause_and_giving_up_is_logged_and_counted(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        for epoch, now in ((1, 1.0), (2, 2.0), (3, 3.0)):
            written.feed(Exited("a", epoch, "signal 11 (SIGSEGV)", cause="SIGSEGV"), now)
            written.feed(Tick(), now + 0.3)
            written.feed(Beat("b", 1, ready=True), now + 0.3)
            if epoch < 3:
                written.starts("a", epoch + 1, now + 0.4)
    once = ["actor_died", "actor_restarts", "actor_starts", "actor_started", "actor_ready"]
    assert events(log, "a") == [*once, *once, "actor_died", "actor_given_up"]
    assert {entry["log_level"] for entry in log if entry["event"] == "actor_starts"} == {"info"}, "they are restarts"
    assert [entry["next_start_in_s"] for entry in log if entry["event"] == "actor_restarts"] == [0.0, 0.25]
    (given_up,) = [entry for entry in log if entry["event"] == "actor_given_up"]
    assert (given_up["log_level"], given_up["next_start_in_s"]) == ("error", 60.0)
    assert given_up["reason"].endswith("signal 11 (SIGSEGV)")
    assert written.counted("deaths", "a", reason="SIGSEGV") == 3
    assert written.counted("restarts", "a") == 2
    assert written.counted("backoffs", "a") == 1
    assert written.counted("give_ups", "a") == 1
    assert written.counted("deaths", "b", reason="SIGSEGV") == 0


def test_an_end_in_good_order_is_no_death_in_the_log(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        written.feed(Exited("a", 1, "exit 0", cause="exit_0"), 1.0)
        written.feed(Exited("b", 1, "exit 1", cause="exit_1"), 1.0)
    (ended, _), (died, _) = ([entry for entry in log if entry.get("peer") == actor] for actor in "ab")
    assert [(one["event"], one["log_level"]) for one in (ended, died)] == [
        ("actor_ended", "info"),
        ("actor_died", "warning"),
    ]


def test_who_was_asked_to_end_and_was_not_done_in_time_is_cut_off(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        written.feed(Restart(("a",)), 1.0)
        written.feed(Exited("a", 1, "not drained within 30 s", cause="not_drained_in_time"), 31.0)
    assert events(log, "a")[:2] == ["actor_drains", "actor_cut_off"]
    assert log[1]["log_level"] == "warning"
    assert written.counted("deaths", "a", reason="not_drained_in_time") == 1


def test_who_was_asked_to_end_and_did_has_not_died(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        written.feed(Restart(("a",), stay_away=True), 1.0)
        written.feed(Exited("a", 1, "exit 0", cause="exit_0"), 1.1)
    assert events(log, "a") == ["actor_drains", "actor_drained"]
    assert written.core.watches["a"].reason == "drained, as requested"


def test_who_is_killed_because_the_mesh_is_to_end_has_not_died(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        written.feed(Stop("down", force=True), 1.0)
        written.feed(Exited("a", 1, "signal 9 (SIGKILL)", cause="SIGKILL"), 1.1)
    assert events(log, "a") == ["actor_killed", "actor_stopped"]
    assert written.counted("deaths", "a", reason="not_wanted") == 0


def test_suspicion_and_the_kill_that_follows_are_logged_and_counted(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        for now in (0.5, 1.0, 1.5, 2.0, 2.5):
            written.feed(Beat("b", 1, ready=True), now)
            written.feed(Tick(), now)
        written.feed(Exited("a", 1, "signal 9 (SIGKILL)", cause="SIGKILL", foreign=True), 2.6)
    assert events(log, "a") == ["actor_suspected", "actor_killed", "actor_died", "actor_restarts"]
    assert log[0]["reason"] == "no heartbeat for 1.5 s"
    assert written.counted("suspicions", "a") == written.counted("kills", "a") == 1
    assert written.counted("deaths", "a", reason="no_heartbeat") == 1


def test_a_failed_core_is_counted_where_it_outlives_its_actor(written: Written) -> None:
    written.record.core_failure("a", "scheduler")
    written.record.core_failure("a", "scheduler")
    assert written.counted("core_failures", "a", core="scheduler") == 2


def test_the_death_of_what_actors_are_forked_from_is_logged_and_counted(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        written.record.zygote_death(Exit("signal 9 (SIGKILL)", "SIGKILL", foreign=True))
    assert [(entry["event"], entry["cause"]) for entry in log] == [("zygote_died", "SIGKILL")]
    assert written.counted("deaths", "zygote", reason="SIGKILL") == 1
    assert b"zygote" in os.read(written.reader, 4096)


def test_who_is_restarted_or_never_came_to_be_has_not_died(written: Written) -> None:
    with structlog.testing.capture_logs() as log:
        written.feed(Restart(("a",)), 1.0)
        written.feed(Exited("a", 1, "exit 0", cause="exit_0"), 1.1)
        # What it was to be forked from fell, and is there again.
        written.feed(SpawnFailed("a", 2, "the zygote ended", foreign=True), 1.2)
        written.feed(Tick(), 1.3)
        written.starts("a", 3, 1.4)
    assert events(log, "a")[-4:] == ["actor_restarts", "actor_starts", "actor_started", "actor_ready"]
    assert written.counted("deaths", "a", reason="exit_0") == written.counted("restarts", "a") == 0
    # Who ends in order without having been asked was wanted.
    written.feed(Exited("a", 3, "exit 0", cause="exit_0"), 1.5)
    written.feed(Tick(), 1.8)
    assert written.counted("deaths", "a", reason="exit_0") == written.counted("restarts", "a") == 1


def test_an_actor_s_counters_are_0_before_anything_happens_to_it() -> None:
    counters = Written().metrics.snapshot().counters
    assert {value for name, value in counters.items() if "supervisor" in name} == {0.0}
    for what in ("suspicions", "kills", "give_ups", "backoffs", "restarts"):
        assert f'mesh_supervisor_{what}_total{{actor="a",role="worker"}}' in counters
    deaths = [name for name in counters if name.startswith("mesh_supervisor_deaths_total")]
    assert 'mesh_supervisor_deaths_total{actor="b",reason="SIGKILL",role="worker"}' in deaths
    assert any("out_of_memory" in name for name in deaths)
