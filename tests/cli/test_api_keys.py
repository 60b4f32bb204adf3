"""API keys as operators give them, and as `meshctl` makes and sends them."""

import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from cli.api_key import own_key
from cli.commands import probe as probe_command
from cli.commands.api_key import new
from cli.commands.chat import ChatOptions, chat
from cli.errors import BadConfig, BadKeys, CliError, WrongUsage
from cli.exit_codes import ExitCode
from cli.plan.api_keys import given_keys, settle_api_keys, take_given_keys
from cli.plan.overrides import overlay
from cli.plan.settings import Settings
from cli.plan.sources import foreign_variables, load_settings
from cli.plan.topology import plan_topology
from cli.protocol import ActorList
from cli.supervisor.forks.role import known_failure
from nodes.api_keys.entries import BadApiKeys, read_lines, sha256_of
from nodes.api_keys.file import read_key_file, write_key_file
from nodes.gateway.config import GatewayConfig
from nodes.model_spec import resolve_model
from tests.cli.launches import MACHINE, configs
from tests.cli.refused import refused
from tests.cli.statuses import actor

LINE = f"alice {sha256_of('sk-a').hex()}"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    write_key_file(path, read_lines(LINE))
    return path


def test_gateways_are_told_the_file_and_nothing_of_what_is_in_it(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    settings = settle_api_keys(load_settings(None, {"KVMESH_API_KEY_FILE": "keys"}, {}), {})
    assert settings.api_key_file == str(file)
    topology = plan_topology(settings, resolve_model("echo"), "echo", MACHINE)
    assert [config.api_key_file for config in configs(topology, "gateway")] == [str(file)]
    assert sha256_of("sk-a").hex() not in repr(topology)
    assert settle_api_keys(Settings(), {}) == Settings()
    with refused(BadConfig, "api_key_file cannot be set in"):
        overlay("gateway", GatewayConfig(model_name="m", context_length=9), {"api_key_file": "x"})


def test_a_file_that_cannot_be_used_is_refused_before_anything_starts(file):
    settings = Settings(api_key_file=str(file))
    file.chmod(0o640)
    with refused(BadKeys, "the file of API keys cannot be used", why="chmod go-rwx", do="meshctl keys api"):
        settle_api_keys(settings, {})
    file.unlink()
    with refused(BadKeys, why="No such file"):
        settle_api_keys(settings, {})


def test_a_host_without_gateways_needs_no_file(file):
    file.unlink()
    ends = "gateways = 1\ntokenizers = 1\ndetokenizers = 1"
    text = f'[hosts.a]\naddress = "127.0.0.1"\n{ends}\n[hosts.b]\naddress = "127.0.0.2"\ndecode = 1\n'
    topology = file.with_name("mesh.toml")
    topology.write_text(f'api_key_file = "{file}"\n{text}')
    settle_api_keys(load_settings(topology, {}, {"host": "b"}), {})
    with pytest.raises(BadKeys):
        settle_api_keys(load_settings(topology, {}, {"host": "a"}), {})


def test_keys_in_the_environment_become_a_file_of_hashes_and_leave_the_environment(file, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(file.parent))
    environment = {"KVMESH_API_KEYS": "alice:sk-a,sk-b", "KVMESH_API_KEY": "sk-a"}
    assert foreign_variables(environment) == []
    settings = settle_api_keys(Settings(name="m"), environment)
    assert settings.api_key_file == str(file.parent / f"kvmesh-{os.getuid()}" / "m" / "api_keys")
    file.chmod(0o644)
    take_given_keys(file, environment)
    assert [key.name for key in read_key_file(file)] == ["alice", "key-2"]
    assert "sk-" not in file.read_text()
    assert environment == {"KVMESH_API_KEY": "sk-a"}
    assert given_keys(environment) is None
    take_given_keys(file, environment)
    with refused(BadConfig, "API keys are given twice", why=str(file)):
        settle_api_keys(Settings(api_key_file=str(file)), {"KVMESH_API_KEYS": "x"})
    for text in ("", " ", "alice:"):
        with refused(BadKeys, "KVMESH_API_KEYS cannot be used"):
            settle_api_keys(Settings(), {"KVMESH_API_KEYS": text})


def test_a_new_key_is_shown_once_and_its_line_lets_it_in(tmp_path, capsys):
    assert new("alice", None, 8, 0, "table") is ExitCode.OK
    said = capsys.readouterr()
    key, line = said.out.strip(), said.err.splitlines()[-1]
    assert line == f"alice {sha256_of(key).hex()} requests=8"
    assert new("paid", None, 0, 0, "table", weight=4) is ExitCode.OK
    assert capsys.readouterr().err.rstrip().endswith(" weight=4")
    path = tmp_path / "keys"
    assert new("alice", path, 0, 5, "json") is ExitCode.OK
    made = json.loads(capsys.readouterr().out)
    assert path.read_text() == made["line"] + "\n" == f"alice {sha256_of(made['key']).hex()} tokens=5\n"
    path.write_text(path.read_text().rstrip())
    new("bob", path, 0, 0, "table")
    assert [one.name for one in read_key_file(path)] == ["alice", "bob"]
    with refused(BadKeys, "has a key bob already"):
        new("bob", path, 0, 0, "table")
    with refused(WrongUsage, "cannot be the name of a key"):
        new("b b", None, 0, 0, "table")
    before = path.read_text()
    path.chmod(0o644)
    with refused(BadKeys, "no key can be added", why="chmod go-rwx"):
        new("carol", path, 0, 0, "table")
    assert path.read_text() == before
    with refused(BadKeys, "no key can be added", why="No such file"):
        new("carol", tmp_path / "nowhere" / "keys", 0, 0, "table")


def test_keys_that_cannot_be_used_are_a_bad_configuration():
    assert known_failure(BadApiKeys("chmod 600")).code is ExitCode.BAD_CONFIG


@pytest.fixture
def server():
    """Knows the key sk-a."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            seen.append((self.path, self.headers["authorization"]))
            known = self.headers["authorization"] == "Bearer sk-a"
            body = b'{"data": [{"id": "m"}]}' if known else b'{"error": {"message": "who are you?"}}'
            self.send_response(200 if known else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            seen.append((self.path, self.headers["authorization"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n')

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", seen
        httpd.shutdown()
        thread.join()


def test_meshctl_sends_the_key_that_its_environment_has(server, monkeypatch, capsys):
    url, seen = server
    monkeypatch.delenv("KVMESH_API_KEY", raising=False)
    with refused(CliError, "status 401", why="who are you?", do="set KVMESH_API_KEY"):
        chat("m", "hello", url, None, ChatOptions())
    monkeypatch.setenv("KVMESH_API_KEY", "sk-a\n")
    assert chat("m", "hello", url, None, ChatOptions()) is ExitCode.OK
    assert seen == [("/v1/models", None), ("/v1/models", "Bearer sk-a"), ("/v1/chat/completions", "Bearer sk-a")]
    told = ActorList(mesh="m", url=url, model="echo", ready=True, actors=[actor("gateway-0")])
    monkeypatch.setattr(probe_command, "find_mesh", lambda name: SimpleNamespace(ask=lambda *_: told))
    assert probe_command.probe("m", "generate", timeout_s=5.0) is ExitCode.OK
    assert seen[-1] == ("/health/generate", "Bearer sk-a")
    monkeypatch.setenv("KVMESH_API_KEY", "sk a")
    assert probe_command.probe("m", "generate", timeout_s=5.0) is ExitCode.USAGE
    capsys.readouterr()
    for text in ("a b", "a\nb", "schlüssel"):
        with refused(WrongUsage, "KVMESH_API_KEY is not an API key"):
            own_key({"KVMESH_API_KEY": text})


def test_an_admins_key_is_made_and_control_needs_one(file, monkeypatch, capsys):
    settings = Settings(name="m", control=True)
    for given, environment in (
        (settings, {}),
        (Settings(control=True, api_key_file=str(file)), {}),
        (settings, {"KVMESH_API_KEYS": "alice:sk-a"}),
    ):
        with refused(BadConfig, r"--control \(control\) needs an admin key", why="browser", do="--admin"):
            settle_api_keys(given, environment)
    assert new("ops", file, 0, 0, "json", admin=True) is ExitCode.OK
    assert json.loads(capsys.readouterr().out)["line"].endswith(" admin")
    settled = settle_api_keys(Settings(control=True, api_key_file=str(file)), {})
    topology = plan_topology(settled, resolve_model("echo"), "echo", MACHINE)
    assert [config.control for config in configs(topology, "gateway")] == [True]
    assert settle_api_keys(settings, {"KVMESH_API_KEYS": "admin=ops:sk-o"}).control
    with pytest.raises(ValueError, match="control needs an api_key_file"):
        GatewayConfig(model_name="m", context_length=9, control=True)
