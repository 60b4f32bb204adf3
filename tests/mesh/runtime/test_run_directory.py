import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from mesh.address import Address, Endpoint, host_of
from mesh.errors import BindError
from mesh.membership.proof import HostSecret
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.transport.base import Channel


def test_it_belongs_to_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = RunDirectory.of_mesh("m")
    assert directory.path == tmp_path / f"kvmesh-{os.getuid()}" / "m"
    directory.create()
    directory.create()
    for path in (directory.path.parent, directory.path, directory.sockets):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    directory.sockets.chmod(0o755)
    with pytest.raises(BindError, match="other users"):
        directory.create()


def test_without_a_runtime_directory_it_is_under_tmp(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert RunDirectory.of_mesh("m").path == Path(f"/tmp/kvmesh-{os.getuid()}/m")


def test_sockets_carry_the_epoch_and_are_short():
    directory = RunDirectory(Path("/run/x"))
    assert str(directory.socket(Address("worker-0", 7), Channel.CONTROL)) == "/run/x/s/worker-0.7.c"
    assert str(directory.socket(Address("worker-0", 7), Channel.DATA)) == "/run/x/s/worker-0.7.d"
    with pytest.raises(BindError, match="too long"):
        directory.socket(Address("x" * 90, 1), Channel.DATA)


def test_the_registry_file_is_replaced_whole(tmp_path):
    directory = RunDirectory(tmp_path)
    bootstrap = directory.bootstrap()
    assert bootstrap.lookup() is None
    for epoch in (1, 2):
        directory.write_registry(Address("registry", epoch), Endpoint("c", str(epoch)))
        assert bootstrap.lookup() == (Address("registry", epoch), Endpoint("c", str(epoch)))
        assert bootstrap.lookup() is bootstrap.lookup()
    assert [path.name for path in tmp_path.iterdir()] == ["registry.json"]
    for damaged in (b"damaged", b"", b'{"actor_id": "\xff"}'):
        directory.registry_file.write_bytes(damaged)
        assert bootstrap.lookup() is None
    directory.registry_file.unlink()
    assert bootstrap.lookup() is None


def test_a_registry_file_that_no_proved_registry_wrote_is_not_believed(tmp_path):
    directory, where = RunDirectory(tmp_path), Endpoint("c", "d")
    secret = HostSecret.draw("m", "", ["registry"], [])
    bootstrap, own = directory.bootstrap(secret), Address("registry", 7)
    later = Address("registry", 8)
    right = secret.prove(*own, "registry")
    forged = {
        "no proof": (later, b""),
        "that of the one before": (later, right),
        "that of a gateway": (later, secret.prove(*later, "gateway")),
        "of another supervisor": (later, HostSecret.draw("m", "", [], []).prove(*later, "registry")),
        "of another mesh": (later, msgspec.structs.replace(secret, mesh="n").prove(*later, "registry")),
        "of another actor": (Address("words-0", 8), secret.prove(*later, "registry")),
        "cut short": (own, right[:-1]),
    }
    for what, (address, proof) in forged.items():
        directory.write_registry(own, where, right)
        assert bootstrap.lookup() == (own, where)
        directory.write_registry(address, where, proof)
        assert bootstrap.lookup() is None, what
        assert directory.bootstrap().lookup() == (address, where), "who has no secret believes the file"
    content = directory.registry_file.read_bytes()
    directory.registry_file.write_bytes(content.replace(right[:-1].hex().encode(), b"no hex"))
    assert bootstrap.lookup() is None
    # On another host than the registry's nobody can prove it, and the file says where its host is.
    directory.write_registry(Address("registry", 0), where)
    assert directory.bootstrap(HostSecret.draw("m", "d", [], [])).lookup() == (Address("registry", 0), where)


def test_a_host_of_several_says_where_it_listens(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.host() is None
    assert directory.host_name() == socket.gethostname()
    record = HostRecord("d", "0.0.0.0", "10.0.0.2", insecure=True)
    directory.write_host(record)
    assert directory.host() == record
    assert directory.host_name() == "d"
    for damaged in (b"", b'{"name": "no/host", "bind": "::", "address": "x"}'):
        directory.host_file.write_bytes(damaged)
        with pytest.raises(BindError, match="start the mesh on this host again"):
            directory.host()
    directory.write_host(None)
    assert directory.host() is None
    directory.write_registry(Address("registry", 1), Endpoint("tcp://a", "tcp://b", "ipc://a", "ipc://b"))
    assert directory.bootstrap().lookup()[1].on_its_host == Endpoint("ipc://a", "ipc://b")


@pytest.mark.parametrize(
    ("actor_id", "host"),
    [
        ("kv-agent-0.d", "d"),
        ("registry", ""),
        ("words-12.rack-3", "rack-3"),
        ("x.", ""),
        ("a.b.c", "c"),
        ("x.D", ""),
        ("worker-decode-0.1", ""),
        ("worker-decode-0.d.1", "d"),
    ],
)
def test_an_id_ends_in_its_host(actor_id, host):
    assert host_of(actor_id) == host


NO_PLAIN_FILES = {
    "a pipe": lambda path: os.mkfifo(path, 0o600),
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "nested": lambda path: path.write_text('{"x": ' + "[" * 100_000),
}


@pytest.mark.parametrize("make", NO_PLAIN_FILES.values(), ids=NO_PLAIN_FILES)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, make):
    directory = RunDirectory(tmp_path)
    for path in (directory.host_file, directory.registry_file):
        make(path)
    with pytest.raises(BindError, match="does not say where this host listens"):
        directory.host()
    assert directory.bootstrap().lookup() is None
