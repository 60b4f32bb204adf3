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
