"""What `meshctl ps` says beside its table."""

import json
from pathlib import Path

import pytest

from cli.commands import ps as command
from cli.exit_codes import ExitCode
from cli.launch.keeper import _notes
from cli.protocol import ActorList, ActorStatus
from mesh.address import Endpoint
from mesh.membership import READY, Member

FALLBACKS = {"kv-agent-1": "tcp instead of nccl: no NCCL (device_unavailable)"}
NOTE = "pages of kv-agent-1 come by tcp instead of nccl: no NCCL (device_unavailable)"


def member(**attributes: object) -> Member:
    return Member(actor_id="kv-agent-0", role="kv_agent", epoch=1, endpoint=Endpoint("c", "d"), attributes=attributes)


def test_what_an_agent_fell_back_to_is_a_note() -> None:
    assert _notes(member(fallbacks=FALLBACKS)) == [NOTE]
    assert _notes(member(fallbacks={})) == _notes(member()) == []


@pytest.mark.parametrize("output", ["table", "json"])
def test_notes_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str, tmp_path: Path
) -> None:
    actors = [
        ActorStatus(f"kv-agent-{number}", "kv_agent", 7, 1, Endpoint("c", "d"), READY, notes=notes)
        for number, notes in enumerate(([NOTE], []))
    ]
    monkeypatch.setattr(command, "find_mesh", lambda name: (tmp_path, None))
    monkeypatch.setattr(
        command, "ask_supervisor", lambda *_: ActorList(mesh="m", url="", model="", ready=True, actors=actors)
    )
    assert command.ps("m", output) is ExitCode.OK
    printed = capsys.readouterr().out
    if output == "json":
        assert [entry["notes"] for entry in json.loads(printed)] == [[NOTE], []]
    else:
        assert printed.splitlines()[3:] == [f"kv-agent-0: {NOTE}"]
