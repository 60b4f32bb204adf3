"""Chaos on a mesh that is not this user's, not this host's, or not there, and chaos that nobody has agreed to."""

import io
from dataclasses import replace

import pytest
import typer

from cli.chaos.blows import KINDS, Blows
from cli.commands.chaos import Options, ask_first, chaos
from cli.errors import BadManifest, CliError, NotRunning, WrongUsage
from tests.cli.manifests import manifest
from tests.cli.refused import refused

OPTIONS = Options(
    seconds=1.0, every=1.0, seed=1, only=(), blows=("kill",), concurrency=1, stall=2.0, timeout=5.0, yes=True
)


def test_no_such_mesh(directory) -> None:
    with pytest.raises(NotRunning):
        chaos("m", OPTIONS, "table")


def test_a_manifest_of_another_mesh(directory, stranger) -> None:
    directory.write_manifest(manifest(directory, stranger, mesh="other"))
    with refused(BadManifest, "cannot be used", why="a mesh named 'other'"):
        chaos("m", OPTIONS, "table")


def test_a_manifest_of_another_hosts_or_of_a_dead_supervisor(directory, stranger) -> None:
    """On a shared directory: this host has a process of that pid, but another one."""
    sound = manifest(directory, stranger)
    directory.write_manifest(manifest(directory, stranger, start_time=sound.start_time + 1))
    with pytest.raises(NotRunning):
        chaos("m", OPTIONS, "table")
    assert stranger.poll() is None


def test_a_directory_that_others_may_enter(directory, stranger) -> None:
    directory.write_manifest(manifest(directory, stranger))
    directory.path.chmod(0o755)
    with refused(CliError, "cannot be used", why="another user owns it, or may enter it"):
        chaos("m", OPTIONS, "table")


def test_an_engines_mesh_has_nothing_to_ask(directory, stranger) -> None:
    directory.write_manifest(manifest(directory, stranger, url=""))
    with refused(WrongUsage, "no gateway"):
        chaos("m", OPTIONS, "table")


class Terminal(io.StringIO):
    """Where somebody types."""

    def isatty(self) -> bool:
        return True


ACTORS = {"registry": "registry", "worker-0.a": "worker", "gateway-0.a": "gateway"}
ASKING = replace(OPTIONS, yes=False)


def test_nobody_is_struck_without_a_yes(monkeypatch, capsys) -> None:
    blows = Blows(1, KINDS, ACTORS)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with refused(WrongUsage, "without being told", why="no terminal", do="--yes"):
        ask_first("m", ASKING, blows, [])
    for typed in ("n\n", "\n"):
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        with pytest.raises(typer.Abort):
            ask_first("m", ASKING, blows, ["b"])
    told = capsys.readouterr().err
    assert "Killed and stopped are: registry, worker-0.a.\n" in told
    assert "Actors of b are left alone: run this there" in told
    assert "Begin? [y/N]" in told


def test_a_yes_is_enough(monkeypatch) -> None:
    blows = Blows(1, KINDS, ACTORS)
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    ask_first("m", ASKING, blows, [])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    ask_first("m", OPTIONS, blows, [])
