"""What `meshctl probe` makes of a gateway that is slow, mute, or none."""

from types import SimpleNamespace

import pytest

from cli.commands import probe as command
from cli.exit_codes import ExitCode
from cli.http_get import get_page
from cli.protocol import ActorList
from tests.cli.answering import answering
from tests.cli.statuses import actor


def asked(monkeypatch, capsys, actors, answer=b"", *, ends=True, timeout_s=5.0, question="generate"):
    """What a probe, for a token if not for something else, returns and prints, where the gateway's port answers so."""

    async def get(host, _port, path, left_s, key):
        async with answering(answer, ends=ends) as port:
            return await get_page(host, port, path, left_s, key)

    told = ActorList(mesh="m", url="http://127.0.0.1:1", model="echo", ready=True, actors=actors)
    monkeypatch.setattr(command, "find_mesh", lambda name: SimpleNamespace(ask=lambda *_: told))
    monkeypatch.setattr(command, "get_page", get)
    code = command.probe("m", question, timeout_s=timeout_s)
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.mark.parametrize(
    ("answer", "ends", "code", "line"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", True, ExitCode.OK, "a token was generated"),
        (b'HTTP/1.1 503 X\r\n\r\n{"reasons": ["no\\nworker", "b"]}', True, ExitCode.NOT_READY, "no worker; b\n"),
        (b"HTTP/1.1 503 X\r\n\r\n<html>", True, ExitCode.NOT_READY, "the gateway answers 503"),
        (b"SSH-2.0-x\r\n", True, ExitCode.NOT_READY, "does not speak HTTP"),
        (b"", True, ExitCode.NOT_READY, "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n", False, ExitCode.TIMED_OUT, "no token came within 0.1 s"),
    ],
)
def test_what_a_gateway_answers(monkeypatch, capsys, answer, ends, code, line):
    timeout_s = 5.0 if ends else 0.1
    got, said = asked(monkeypatch, capsys, [actor("gateway-0")], answer, ends=ends, timeout_s=timeout_s)
    assert (got, said.count("\n")) == (code, 1)
    assert line in said


def test_a_host_without_a_gateway_is_asked_for_its_actors_alone(monkeypatch, capsys):
    actors = [actor("supervisor"), actor("worker-0"), actor("gateway-0", supervised=False)]
    assert asked(monkeypatch, capsys, actors)[0] == ExitCode.OK
    code, line = asked(monkeypatch, capsys, [*actors, *(actor(f"r{n}-0", state="starting") for n in range(5))])
    assert code == ExitCode.NOT_READY
    assert line.startswith("not ready: r0-0 is starting; r1-0 is starting; ")
    assert line.endswith("; and 2 more\n")


def test_who_is_away_by_request_is_not_counted_as_ready(monkeypatch, capsys):
    actors = [actor("supervisor"), *(actor(f"worker-{n}", state="drained") for n in range(5)), actor("gateway-0")]
    code, line = asked(monkeypatch, capsys, [*actors, actor("worker-9", state="released")], question="ready")
    assert code == ExitCode.OK
    drained = "5 drained (worker-0, worker-1, worker-2, and 2 more)"
    assert line.startswith(f"ready: 1 actors, {drained}, 1 released (worker-9), in ")
    assert asked(monkeypatch, capsys, actors[-1:], question="ready")[1].startswith("ready: 1 actors, in ")
