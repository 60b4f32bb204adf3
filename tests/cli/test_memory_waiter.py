"""`meshctl release` and `resume` ask once, and then look: who asks for the opposite meanwhile is not undone."""

from collections.abc import Callable
from typing import Any

import pytest

from cli.commands import memory as command
from cli.errors import CliError, TimedOut, TryAgain, Undone, WrongUsage
from cli.exit_codes import ExitCode
from cli.protocol import ActorStatus
from mesh.membership.view import READY
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from tests.cli.refused import refused
from tests.cli.statuses import actor

RELEASE, RESUME, LOOK = ReleaseMemory(groups=["d"]), ResumeMemory(groups=["d"]), ListMemory()
OTHER = GroupMemory(group="p", state="held")


def d(state: str, reason: str = "") -> list[GroupMemory]:
    return [GroupMemory(group="d", state=state, reason=reason)]


class Supervisor:
    """Gives one answer after the other, the last one for good; `epochs` of its agent likewise."""

    def __init__(self, *answers: list[GroupMemory] | CliError, epochs: tuple[int, ...] = (1,)) -> None:
        self.answers = list(answers)
        self.epochs = list(epochs)
        self.asked: list[Any] = []
        self.now = 0.0
        self.worker = READY

    def actors(self) -> list[ActorStatus]:
        epoch = self.epochs.pop(0) if len(self.epochs) > 1 else self.epochs[0]
        return [actor("kv-agent-0", role="kv_agent", epoch=epoch), actor("worker-d", state=self.worker)]

    def ask(self, question: Any, answer_type: type) -> Any:
        self.asked.append(question)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, CliError):
            raise answer
        return MemoryList(groups=answer)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Supervisor, Any], ExitCode]:
    def run_with(supervisor: Supervisor, wanted: Any) -> ExitCode:
        monkeypatch.setattr(command, "find_mesh", lambda name: supervisor)
        monkeypatch.setattr(command.time, "sleep", supervisor.sleep)
        monkeypatch.setattr(command.time, "monotonic", lambda: supervisor.now)
        if isinstance(wanted, ReleaseMemory):
            return command.release("m", wanted, timeout_s=5.0, output="json")
        return command.resume("m", wanted, timeout_s=5.0, output="json")

    return run_with


def test_a_wish_that_was_answered_is_not_asked_again(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(d("releasing"), [*d("releasing"), OTHER], [*d("released"), OTHER])
    assert run(supervisor, RELEASE) is ExitCode.OK
    assert supervisor.asked == [RELEASE, LOOK, LOOK]
    assert '"p"' not in capsys.readouterr().out, "it was not meant"


def test_all_groups_are_those_that_the_first_answer_names(run: Any) -> None:
    both = [*d("releasing"), GroupMemory(group="p", state="released")]
    # The list lacks the groups of an agent that is away.
    supervisor = Supervisor(both, both[1:], [*d("released"), both[1]])
    assert run(supervisor, ReleaseMemory()) is ExitCode.OK
    assert supervisor.asked == [ReleaseMemory(), LOOK, LOOK]


def again(why: str) -> TryAgain:
    return TryAgain("the mesh refuses this", why=why, do="try again")


def test_a_wish_that_may_have_been_lost_is_asked_again(run: Any) -> None:
    supervisor = Supervisor(again("no kv_agent is ready"), d("releasing"), again("a moment"), d("released"))
    assert run(supervisor, RELEASE) is ExitCode.OK
    assert supervisor.asked == [RELEASE, RELEASE, LOOK, LOOK]


@pytest.mark.parametrize(
    ("wanted", "answers", "who"),
    [
        (RELEASE, [d("releasing"), d("held")], "d not released: somebody else resumed it"),
        (RELEASE, [d("releasing"), d("resuming")], "d not released: somebody else resumed it"),
        (RESUME, [d("resuming"), d("releasing", "worker-d: not now")], "d not held: somebody else released it"),
        (RESUME, [d("resuming"), d("released")], "d not held: somebody else released it"),
    ],
)
def test_who_asks_for_the_opposite_is_named_and_not_undone(run: Any, wanted: Any, answers: Any, who: str) -> None:
    supervisor = Supervisor(*answers)
    with pytest.raises(Undone, match=who):
        run(supervisor, wanted)
    assert supervisor.asked == [wanted, LOOK]


def test_a_group_that_is_released_again_before_it_serves_is_not_waited_for(run: Any) -> None:
    supervisor = Supervisor(d("held"), d("releasing"))
    supervisor.worker = "released"
    with pytest.raises(Undone):
        run(supervisor, RESUME)
    supervisor = Supervisor(d("held"), d("held"))
    supervisor.worker = "starting"
    with pytest.raises(TimedOut, match="worker-d not ready"):
        run(supervisor, RESUME)


def test_a_wish_that_could_not_be_done_is_tried_again(run: Any) -> None:
    supervisor = Supervisor(d("resuming"), d("released", "the trainer has it"), d("resuming"), d("held"))
    assert run(supervisor, RESUME) is ExitCode.OK
    assert supervisor.asked == [RESUME, LOOK, RESUME, LOOK]
    with refused(TimedOut, why="the trainer has it"):
        run(Supervisor(d("resuming"), d("released", "the trainer has it")), RESUME)


def test_a_wish_that_died_with_its_agent_is_asked_again(run: Any) -> None:
    supervisor = Supervisor(d("resuming"), d("released"), d("resuming"), d("held"), epochs=(1, 2))
    assert run(supervisor, RESUME) is ExitCode.OK
    assert supervisor.asked == [RESUME, LOOK, RESUME, LOOK]


def test_a_wish_that_has_to_wait_for_another_one_is_asked_until_it_is_taken(run: Any) -> None:
    held = GroupMemory(group="p", state="releasing")
    supervisor = Supervisor([*d("resuming"), held], d("resuming"), d("releasing"), [*d("released"), held],
                            [*d("released"), GroupMemory(group="p", state="released")])  # fmt: skip
    assert run(supervisor, ReleaseMemory()) is ExitCode.OK
    assert supervisor.asked == [ReleaseMemory(), RELEASE, RELEASE, LOOK, LOOK]


def test_a_release_that_keeps_everything_is_a_wrong_command_line_and_nobody_is_asked(
    run: Callable[[Supervisor, Any], ExitCode],
) -> None:
    supervisor = Supervisor(d("held"))
    with refused(WrongUsage, why="nothing to release", do="give one of the two, or neither"):
        run(supervisor, ReleaseMemory(keep_kv=True, keep_weights=True))
    assert supervisor.asked == []
