"""A host that joins by a token: the token, the settings it takes over, and what is refused before anything runs."""

import base64
import hashlib
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest

from cli.commands.join import Join
from cli.commands.up import check_ports
from cli.errors import BadConfig, CannotBind, NotRunning, WrongUsage
from cli.plan.hosts import HostSettings
from cli.plan.joining import host_name_of, joined_settings, plan_joiner
from cli.plan.settings import KVSettings, Settings
from cli.plan.spec import shared_settings
from cli.plan.token import JoinToken, parse_token
from mesh.runtime.run_directory import RunDirectory
from mesh.testing.ports import free_port
from tests.cli.refused import refused

TOKEN = JoinToken("blue", "10.0.0.1", 7400, "head", "k" * 40)
HOSTS = {
    "head": HostSettings(address="10.0.0.1", gateways=1, tokenizers=1, detokenizers=1, device="cpu"),
    "d": HostSettings(address="10.0.0.3", decode=1, device="cpu"),
}


def joiner(**options):
    return plan_joiner({"decode": 1, "port": None, **options}, TOKEN, "Box-7.lan", "10.0.0.9")


def told(**settings):
    """What a mesh of these settings tells, as it comes from the wire."""
    shared = shared_settings(Settings(name="blue", hosts=HOSTS, on="head", **settings), "tiny")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(shared))


def signed(content):
    """A token of any content, whose check is right: it is no secret how that is made."""
    check = hashlib.blake2b(content, digest_size=4).digest()
    return "kvmesh1." + base64.urlsafe_b64encode(content + check).decode().rstrip("=")


def test_a_token_says_what_it_was_made_of():
    assert parse_token(f" {TOKEN.text()}\n") == TOKEN
    assert TOKEN.text().startswith("kvmesh1.")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not begin with kvmesh1."),
        (TOKEN.text().replace("kvmesh1", "kvmesh2"), "of version kvmesh2"),
        ("kvmesh1.", "cut short"),
        ("kvmesh1.ä", "cut short"),
        ("kvmesh1." + "A" * 2000, "too long"),
        (signed(b"\x94\xa1\xff\xa1x\x07\xa1h"), "its content cannot be used"),
        (JoinToken("NO NAME", "x", 7400, "head").text(), "its content cannot be used"),
    ],
)
def test_a_token_that_is_none_is_refused(text, why):
    with refused(BadConfig, why=why, do="meshctl keys token"):
        parse_token(text)


def test_a_token_cut_short_anywhere_or_mistyped_is_refused():
    text = TOKEN.text()
    for length in range(len(text)):
        with pytest.raises(BadConfig):
            parse_token(text[:length])
    for place in range(len("kvmesh1."), len(text) - 1):
        other = "B" if text[place] == "A" else "A"
        with pytest.raises(BadConfig):
            parse_token(text[:place] + other + text[place + 1 :])


@pytest.mark.parametrize(
    ("machine", "name"),
    [("Box-7.lan", "box-7"), ("GPU_node_number_12", "gpu-node-num"), ("-.-", "h"), ("7" * 12, "h" + "7" * 11)],
)
def test_a_machine_gives_its_host_a_valid_name(machine, name):
    assert host_name_of(machine) == name
    assert joiner(host=name).name == name


def test_a_host_takes_over_what_the_mesh_serves():
    told_settings = told(dtype="float32", context_length=512, kv=KVSettings(page_size=32, pages=200), max_running=7)
    settings = joined_settings(TOKEN, joiner(), told_settings, {})
    assert (settings.name, settings.on, settings.registry_host) == ("blue", "box-7", "head")
    assert settings.own_host == HostSettings(address="10.0.0.9", decode=1, device="cpu")
    assert settings.hosts["d"] == HOSTS["d"]
    assert (settings.dtype, settings.context_length, settings.max_running) == ("float32", 512, 7)
    assert (settings.kv.page_size, settings.kv.pages) == (32, 200)
    settings = joined_settings(
        TOKEN,
        joiner(host="e", address="10.9.9.9", device="cuda", ports="7500-7599", kv__memory="1GiB"),
        told_settings,
        {},
    )
    assert settings.own_host == HostSettings(address="10.9.9.9", decode=1, device="cuda", ports="7500-7599")
    assert (settings.kv.pages, settings.kv.memory, settings.device) == (None, "1GiB", "cuda")


def test_a_host_on_the_loopback_listens_there_alone():
    assert joiner(address="127.0.0.3").host.bind == "127.0.0.3"
    assert joiner().host.bind == "0.0.0.0"


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({"host": "head"}, BadConfig, "has its registry on the host of that name"),
        ({"host": "Not Valid"}, BadConfig, "lower-case"),
        ({"name": "green"}, BadConfig, "says 'green'"),
        ({"decode": None}, WrongUsage, "what its command line says"),
        ({"decode": 1000}, BadConfig, "256"),
        ({"device": "tpu"}, BadConfig, "cpu, cuda"),
        ({"address": "http://x"}, BadConfig, "without a port"),
        ({"ports": "7500"}, BadConfig, "ports"),
    ],
)
def test_a_command_line_that_makes_no_host_is_refused(options, kind, why):
    with pytest.raises(kind) as caught:
        joiner(**options)
    assert why in f"{caught.value.why} {caught.value.do}"


def test_a_file_beside_a_token_is_refused(tmp_path):
    with pytest.raises(WrongUsage, match="cannot be combined with a topology file"):
        Join(TOKEN.text(), tmp_path / "mesh.toml", {"decode": 1}, {})


def test_without_keys_beyond_the_loopback_it_has_to_be_said():
    with pytest.raises(BadConfig, match="no keys for its links"):
        Join(JoinToken("blue", "127.0.0.1", 7400, "head").text(), None, {"decode": 1, "address": "10.0.0.9"}, {})


def test_a_registry_that_is_not_there_is_said_to_be_so():
    token = JoinToken("blue", "127.0.0.1", free_port(), "head")
    join = Join(token.text(), None, {"decode": 1, "host": "e"}, {})
    with tempfile.TemporaryDirectory(prefix="kvt") as path:
        run = RunDirectory(Path(path) / "blue")
        run.create()
        with refused(NotRunning, "cannot be reached", why=f"127.0.0.1:{token.port}"):
            join.settings(run)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_registry_whose_ports_are_taken_does_not_start(taken):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        hosts = {"head": HostSettings(address="127.0.0.1", bind="127.0.0.1")}
        with refused(CannotBind, "the registry cannot listen at", do="registry_port"):
            check_ports(Settings(hosts=hosts, on="head", registry_port=port - taken))
