"""Progress lines, log rotation, tables, errors, the forwarding of a background start."""

import importlib
import os
import re
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from cli.commands.up import _forward, check_port
from cli.errors import BadModel, CliError
from cli.exit_codes import FATAL_EXITS, ExitCode
from cli.output import duration, print_json, print_table
from cli.plan.role_configs import BUILT_IN
from cli.plan.settings import Settings
from cli.supervisor.kept.log_files import rotate
from cli.supervisor.told.progress import READY_MARK, Progress
from cli.supervisor.told.ready import ready_text
from mesh.membership.view import SUPERVISOR
from nodes import roles
from nodes.amounts import amount


def drained(reader):
    os.set_blocking(reader, False)
    return os.read(reader, 1 << 16).decode()


def test_a_line_per_actor_when_it_is_ready():
    reader, writer = os.pipe()
    progress = Progress(writer)
    for stage in ("spawn", "hello", "hello", "ready"):
        progress.stage("worker-0", stage)
    text = drained(reader)
    assert re.fullmatch(r" +\d+\.\d\d s  worker-0 +ready   spawn to hello 0\.00 s, load 0\.00 s\n", text)
    progress.stage("worker-0", "spawn")
    progress.stage("worker-0", "spawn")
    progress.stage("worker-0", "ready")
    assert drained(reader).endswith("load 0.00 s\n")
    os.close(reader)
    progress.note("nobody listens")
    progress.note("and nobody minds")
    os.close(writer)


def test_long_work_of_an_actor_is_a_line_now_and_then(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    clock = [0.0]
    progress = Progress(writer)
    for second in range(10):
        clock[0] = float(second)
        progress.working("worker-0", f"loading {second}/28 layers")
        progress.working("worker-1", "")
    progress.working("worker-0", "")
    progress.working("worker-0", "loading 0/28 layers")
    lines = drained(reader).splitlines()
    assert [line.split("  ", 2)[-1].split() for line in lines] == [
        ["worker-0", "loading", f"{second}/28", "layers"] for second in (3, 6, 9)
    ]
    os.close(reader)
    os.close(writer)


def test_ready_ends_the_pipe():
    reader, writer = os.pipe()
    progress = Progress(writer, is_pipe=True)
    progress.ready("up\n")
    progress.note("unheard")
    assert drained(reader) == f"\nup\n\n{READY_MARK}"
    assert os.read(reader, 1) == b""
    os.close(reader)


def planned(name="default", model_name="tiny", limits="", vectors="", **settings):
    settings = Settings(name=name, **settings)
    return Mock(settings=settings, url="http://h:1", model_name=model_name, limits=limits, vectors=vectors)


def test_the_ready_text_can_be_pasted():
    text = ready_text(planned(limits="KV: 7 tokens"), 1.25, "")
    assert "ready at http://h:1 in 1.2 s\nKV: 7 tokens\n" in text
    assert "curl http://h:1/v1/chat/completions" in text
    assert "meshctl chat\n" in text
    assert "7 tokens\n\n  curl" in text
    assert "meshctl chat --name other\n" in ready_text(planned("other"), 1.0, "")
    assert "\n7 tokens\nslow\n\n  curl" in ready_text(planned("other", limits="7 tokens"), 1.0, "slow")
    for kind, path in (("embedding", "/v1/embeddings"), ("yes_no", "/rerank"), ("classify", "/classify")):
        text = ready_text(planned(vectors=kind), 1.0, "")
        assert f"curl http://h:1{path} " in text
        assert "meshctl chat" not in text


def test_what_is_typed_next_names_the_key_where_one_is_needed():
    text = ready_text(planned(api_key_file="/keys"), 1.0, "")
    assert '-H "authorization: Bearer $KVMESH_API_KEY"' in text
    assert "authorization" not in ready_text(planned(), 1.0, "")


def forwarded(*chunks):
    reader, writer = os.pipe()
    for chunk in chunks:
        os.write(writer, chunk)
    os.close(writer)
    try:
        return _forward(reader)
    finally:
        os.close(reader)


def test_forwarding_sees_the_mark_or_the_end(capsys):
    assert forwarded(b"one\n", b"two\n" + READY_MARK.encode())
    assert not forwarded(b"error: no\n")
    assert capsys.readouterr().err == "one\ntwo\nerror: no\n"


def test_full_logs_are_cut_and_one_is_kept(tmp_path):
    small, big = tmp_path / "small.log", tmp_path / "big.log"
    small.write_text("s")
    with big.open("ab") as writer:
        writer.write(b"x" * 100)
        writer.flush()
        assert rotate(tmp_path, 10) == [big]
        writer.write(b"y")
        writer.flush()
    assert big.read_bytes() == b"y"
    assert (tmp_path / "big.log.1").read_bytes() == b"x" * 100
    assert rotate(tmp_path, 10) == []


@pytest.mark.parametrize("module", ["cli", "cli.main"])
def test_either_module_is_the_command(module):
    ran = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("meshctl ")


def test_errors_say_what_why_and_what_to_do():
    error = BadModel("it cannot be served", why="it is gone", do="find it")
    assert str(error) == "error: it cannot be served\n  why: it is gone\n  do:  find it"
    assert error.exit_code == ExitCode.BAD_MODEL
    assert error.exit_code in FATAL_EXITS
    assert CliError("x", why="y", do="z").exit_code not in FATAL_EXITS


def test_tables_and_json(capsys):
    print_table(["A", "LONGER"], [["value", "x"], ["v", ""]])
    assert capsys.readouterr().out == "A      LONGER\nvalue  x\nv\n"
    assert print_table(["A", "BB", "C"], [["1", "2", "3"]], width=7, dispensable=("C", "BB")) == ["C"]
    assert capsys.readouterr().out == "A  BB\n1  2\n"
    assert print_table(["A", "BB", "C"], [["1", "2", "3"]], width=8, dispensable=("C", "BB")) == []
    assert capsys.readouterr().out == "A  BB  C\n1  2   3\n"
    print_json({"a": [1]})
    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n'


def test_amounts():
    sizes = (1536, 5 << 20, 600 << 20, 100 << 30, 100 << 40)
    assert [amount(size) for size in sizes] == ["1.5 KiB", "5.0 MiB", "600.0 MiB", "100.0 GiB", "100.0 TiB"]


def test_durations():
    assert [duration(s) for s in (0.9, 59, 60, 3599, 3661)] == ["0 s", "59 s", "1 m 0 s", "59 m 59 s", "1 h 1 m"]


def test_a_free_port_may_be_taken():
    check_port("127.0.0.1", 0)


def test_every_role_of_the_mesh_has_an_actor_of_that_role():
    for role, built_in in BUILT_IN.items():
        assert getattr(importlib.import_module(built_in.module), built_in.actor).role == role
    assert {*BUILT_IN, SUPERVISOR} == roles.ROLES
