"""`meshctl keys token`: whether the token has a key, and which."""

from cli.errors import BadKeys
from cli.plan.token import parse_token
from mesh.address import Address, Endpoint
from mesh.runtime.run_directory import HostRecord
from tests.cli.refused import refused


def token_of(machine, *arguments):
    return parse_token(machine.keys("token", *arguments)[0])


def test_a_host_that_does_not_know_the_registry_s_key_makes_no_token(head, d):
    key = head.new("--host", "head", "-f", str(head.file))
    where = str(d.home / "K")
    of_file = ("-f", str(d.file), "--keys", where)
    with refused(BadKeys, "this host has no keys", do=f"--keys {where}"):
        token_of(d, *of_file)
    d.new("--host", "d", *of_file)
    with refused(
        BadKeys, "does not know the keys", do=("meshctl keys add head", "--roles registry", f"--keys {where}")
    ):
        token_of(d, *of_file)
    d.keys("add", "head", key, "--roles", "registry", *of_file)
    assert token_of(d, *of_file) == token_of(head, "-f", str(head.file))
    assert token_of(d, *of_file).public_key == key


def test_a_mesh_without_keys_has_tokens_without(head, monkeypatch):
    assert token_of(head, "-f", str(head.file)).public_key == ""
    head.new("--host", "d", "-f", str(head.file))
    monkeypatch.setenv("KVMESH_INSECURE", "true")
    assert token_of(head, "-f", str(head.file)).public_key == "", "whatever keys there are"


def test_the_token_of_a_running_mesh_has_the_key_that_it_runs_with(head, directory):
    where = head.home / "K"
    key = head.new("--host", "head", "--registry", "--name", "m", "--keys", str(where))
    directory.run.write_host(HostRecord("head", "127.0.0.1", "127.0.0.1", False, str(where)))
    endpoint = Endpoint("tcp://127.0.0.1:7400", "tcp://127.0.0.1:7401", "ipc:///c", "ipc:///d")
    directory.run.write_registry(Address("registry", 1), endpoint)
    assert token_of(head, "--name", "m").public_key == key
