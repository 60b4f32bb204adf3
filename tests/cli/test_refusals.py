"""What a command says, and with which exit code it ends, where a supervisor refuses."""

import pytest

from cli.client import refusal
from cli.errors import TryAgain
from cli.exit_codes import ExitCode
from mesh.errors import RemoteError


@pytest.mark.parametrize("code", ["unknown_actor", "unknown_group", "unknown_host"])
def test_a_name_that_the_mesh_does_not_have_is_a_wrong_command_line(code: str) -> None:
    error = refusal(RemoteError(code, "there is no x"), "blue")
    assert (error.exit_code, error.why) == (ExitCode.USAGE, "there is no x")


@pytest.mark.parametrize(
    ("code", "exit_code", "do"),
    [
        ("not_given", ExitCode.FAILED, "use another --actor-id or role"),
        ("not_restartable", ExitCode.USAGE, "use meshctl down, then meshctl up"),
    ],
)
def test_what_nobody_can_have_is_refused_with_another_way(code: str, exit_code: ExitCode, do: str) -> None:
    error = refusal(RemoteError(code, "only the supervisor may"), "blue")
    assert (error.exit_code, error.why, error.do) == (exit_code, "only the supervisor may", do)


@pytest.mark.parametrize("code", ["absent_host", "unreachable", "peer_lost", "deadline_exceeded"])
def test_a_host_that_does_not_answer_is_as_a_mesh_that_does_not(code: str) -> None:
    error = refusal(RemoteError(code, "the supervisor of d: no answer", retryable=True), "blue")
    assert error.exit_code == ExitCode.NOT_RUNNING
    # Whoever waits for memory asks again.
    assert isinstance(error, TryAgain)


def test_another_wish_under_way_is_neither() -> None:
    error = refusal(RemoteError("restart_running", "another one", retryable=True), "blue")
    assert (error.exit_code, isinstance(error, TryAgain)) == (ExitCode.FAILED, True)
    assert refusal(RemoteError("not_recordable", "no room"), "blue").exit_code == ExitCode.FAILED
