"""A mesh whose clients need keys: nothing that it writes or passes on has one of them."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cli.exit_codes import ExitCode

pytestmark = pytest.mark.process

KEY = "sk-only-for-this-test"


def test_a_key_from_the_environment_lets_in_and_is_nowhere_else(host):
    options = ("--model", "echo", "--mixed", "1", "--gateways", "2")
    printed = host.meshctl("up", *options, "--dry-run", KVMESH_API_KEYS=f"alice:{KEY}")
    assert f'"api_key_file":"{host.run_directory}/api_keys"' in printed.stdout
    assert KEY not in printed.stdout + printed.stderr
    mesh = host.up(*options, KVMESH_API_KEYS=f"alice:{KEY}")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        host.say("hello")
    assert host.meshctl("chat", "hello").returncode == ExitCode.FAILED
    said = host.meshctl("chat", "hello", KVMESH_API_KEY=KEY)
    assert (said.returncode, said.stdout.strip()) == (ExitCode.OK, "hello"), said.stderr
    assert host.meshctl("probe", "generate").returncode == ExitCode.OK
    assert "API key" not in host.meshctl("ps").stdout, "both gateways have the same"
    logged = host.meshctl("logs", "gateway", "-n", "100").stdout
    assert '"api_key":"alice"' in logged
    # The supervisor's own environment is what its user gave it; nobody inherits the key from it.
    pids = host.pids()
    told = [Path(f"/proc/{pid}/{what}").read_bytes() for actor_id, pid in pids.items() if actor_id != "supervisor"
            for what in ("environ", "cmdline")]  # fmt: skip
    files = [path.read_bytes() for path in host.run_directory.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in content for content in [*told, *files, mesh.log.read_bytes()])
    host.ends_well(mesh)
    assert not (host.run_directory / "api_keys").exists()
