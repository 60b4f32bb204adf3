"""`meshctl keys` on two hosts, which are two directories, and what `up` makes of what it wrote."""

import json
import shlex
import shutil

import msgspec
import pytest

from cli.errors import BadConfig, BadKeys, WrongUsage
from cli.plan.keys import ENCRYPTED, INSECURE, links_note
from mesh.membership.keys import HostKey
from mesh.runtime.key_files import KeyDirectory
from nodes.roles import ROLES
from tests.cli.machines import HOSTS
from tests.cli.refused import refused


def typed(text, start):
    """The command that a hint names, as a shell takes it apart, without `meshctl keys`."""
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return shlex.split(line.removeprefix(start))[2:]


def test_two_hosts_come_to_know_each_other_by_what_they_are_told_to_type(head, d):
    first, _ = head.keys("new", "--host", "head", "-f", str(head.file))
    own, hints = d.keys("new", "--host", "d", "-f", str(d.file))
    there, here = typed(hints, "on head:  "), typed(hints, "here:  ")
    assert there == ["add", "d", own.strip(), "--name", "blue"]
    with refused(BadKeys, "does not know the keys", do="--roles registry --name blue"):
        d.settled("d")
    d.keys(*(first.strip() if word == "ITS_PUBLIC_KEY" else word for word in here))
    head.keys(*there)
    assert [one["host"] for one in head.listed("--name", "blue")["hosts"]] == ["d", "head"]
    assert (head.allowed("blue").version, d.allowed("blue").version) == (2, 0)
    assert d.allowed("blue").registry().public_key == first.strip()
    for machine, host in ((head, "head"), (d, "d")):
        settled = machine.settled(host)
        assert settled.keys == str(machine.home / "kvmesh" / "blue")
        assert links_note(settled) == ENCRYPTED
    # Added again it is as it was; with other roles it is another list.
    head.keys(*there)
    assert head.allowed("blue").version == 2
    head.keys(*there, "--roles", "worker, scheduler")
    assert head.allowed("blue").host("d").roles == ("worker", "scheduler")
    # What may be a slip is taken, as actors of one's own have such roles, and said.
    said = head.keys(*there, "--roles", "cook,worke,supervisor")[1]
    assert "as cook, worke, supervisor (before: worker, scheduler)" in said
    assert f"cook is not one of the built-in roles: those are {min(ROLES)}," in said
    assert "worke is not one of the built-in roles; did you mean worker?" in said
    assert "without the role supervisor" not in said
    assert "without the role supervisor" in head.keys(*there, "--roles", "worker, scheduler")[1]
    table = head.keys("ls", "--name", "blue")[0]
    assert "worker, scheduler" in table
    assert head.allowed("blue").version == 5
    # The registry's host has other roles too.
    assert all(head.allowed("blue").host("head").may_have(role) for role in ("registry", "gateway", "custom"))
    _, said = head.keys("revoke", "d", "--name", "blue")
    assert "revoked" in said
    assert head.allowed("blue").host("d") is None
    assert head.allowed("blue").version == 6


def test_commands_for_this_host_name_its_directory_of_keys_and_quote_any_key(head, d, monkeypatch):
    where = d.home / "their keys"
    first = head.new("--host", "head", "-f", str(head.file))
    # Most keys have characters that a shell would take for its own; those that have none are quoted as well.
    plain = HostKey("d", "rq5uPmYfrobbWpAcThisIsOnlyAnExample01234", "")
    monkeypatch.setattr("cli.commands.keys.HostKey.new", lambda host: plain)
    monkeypatch.setattr(HostKey, "check", lambda key: None)
    hints = d.keys("new", "--host", "d", "-f", str(d.file), "--keys", str(where))[1]
    assert f"on head:  meshctl keys add d '{plain.public_key}' --name blue\n" in hints
    assert "here:  meshctl keys add head 'ITS_PUBLIC_KEY' --roles registry --name blue --keys '" in hints
    with refused(BadKeys, do=("'ITS_PUBLIC_KEY'", f"--keys '{where}'")):
        d.settled("d", KVMESH_KEYS=str(where))
    with refused(BadKeys, "has no keys", do=f"--host p --name blue --keys '{where}-2'"):
        d.settled("p", KVMESH_KEYS=f"{where}-2")
    here = typed(hints, "here:  ")
    d.keys(*(first if word == "ITS_PUBLIC_KEY" else word for word in here))
    assert KeyDirectory(where).read_allowed().registry().public_key == first
    with refused(BadKeys, "this host has no keys", do="meshctl keys new --host NAME --keys /not/here"):
        d.keys("ls", "--keys", "/not/here")


def test_keys_are_this_users_alone_and_not_written_over(head):
    key = head.new("--host", "head", "--registry")
    directory = head.home / "kvmesh" / "default"
    modes = [path.stat().st_mode & 0o777 for path in (directory, directory / "host.json", directory / "allowed.json")]
    assert modes == [0o700, 0o600, 0o600]
    with refused(BadKeys, "already has keys", do="--force"):
        head.new("--host", "head", "--registry")
    another, said = head.keys("new", "--host", "head", "--registry", "--force")
    another = another.strip()
    assert "if host head is running, restart it: `meshctl down --host head --name default`" in said
    assert another != key
    assert (head.allowed().version, head.allowed().registry().public_key) == (3, another)


def test_what_cannot_be_added_or_revoked(head, d):
    head.new("--host", "head", "--registry")
    key, another = d.new("--host", "d"), HostKey.new("x").public_key
    head.keys("add", "d", key)
    for arguments, what, do in (
        (("add", "p", key), "host d already has that public key", "correct"),
        (("add", "d", another), "there already is a host of that name", "meshctl keys revoke d"),
        (("add", "p", key[:39]), "is not a public key", "correct"),
        (("add", "p", another, "--roles", "registry"), "it is on host head", "leave that role out"),
        (("add", "p", another, "--roles", "Worker"), "is not a valid role", "correct"),
        (("add", "P", another), "the name of a host is 'P'", "correct"),
        (("revoke", "head"), "the list is kept there", "meshctl keys new --host head --force"),
        (("revoke", "dd"), "not on the list", "did you mean d?"),
    ):
        with refused(BadConfig, what, do=do):
            head.keys(*arguments)
    assert head.allowed().version == 2


def test_keys_in_a_directory_alone_are_not_said_to_be_of_the_default_mesh(head, monkeypatch):
    where = head.home / "K"
    of_directory = ("--keys", str(where))
    said = head.keys("new", "--host", "head", "--registry", *of_directory)[1]
    said += head.keys("add", "d", HostKey.new("d").public_key, *of_directory)[1]
    assert said == f"host head has its keys in {where}\nhost d may join as any but registry\n"
    assert head.keys("ls", *of_directory)[0].startswith(f"{where}: version 2\n")
    assert head.listed(*of_directory)["mesh"] is None
    for named in (("-f", str(head.file)), ("--name", "blue")):
        assert head.keys("ls", *named, *of_directory)[0].startswith(f"blue: version 2, in {where}\n")
    monkeypatch.setenv("KVMESH_NAME", "blue")
    assert head.listed(*of_directory)["mesh"] == "blue"


def test_a_copy_of_the_list_is_not_changed(head, d):
    head.new("--host", "head", "--registry")
    head.keys("add", "d", d.new("--host", "d"))
    KeyDirectory(d.home / "kvmesh" / "default").write_allowed(head.allowed())
    assert "a copy of host head's" in d.keys("ls")[0]
    for arguments in (("revoke", "head"), ("add", "p", HostKey.new("p").public_key, "--roles", "registry")):
        with pytest.raises(BadKeys, match="cannot be changed here") as caught:
            d.keys(*arguments)
        assert caught.value.do == "run this on host head"


def test_a_host_is_told_the_key_of_a_registry_s_host_that_lost_its_own(head, d):
    first = head.new("--host", "head", "--registry")
    head.keys("add", "d", d.new("--host", "d"))
    copy = head.allowed()
    KeyDirectory(d.home / "kvmesh" / "default").write_allowed(copy)
    d.keys("add", "head", first, "--roles", "registry")
    assert d.allowed() == copy, "it is the one that is known"
    shutil.rmtree(head.home / "kvmesh" / "default")
    another = head.new("--host", "head", "--registry")
    d.keys("add", "head", another, "--roles", "registry")
    assert (d.allowed().version, d.allowed().registry().public_key) == (0, another)


def test_the_registry_s_host_gets_another_key_without_its_file(head):
    head.new("--host", "head", "-f", str(head.file))
    head.keys("add", "p", HostKey.new("p").public_key, "--name", "blue")
    another, hints = head.keys("new", "--host", "head", "--force", "--name", "blue")
    assert head.settled("head").keys
    assert "meshctl keys add" not in hints
    allowed = head.allowed("blue")
    assert (allowed.registry().public_key, [one.host for one in allowed.hosts]) == (another.strip(), ["head", "p"])


@pytest.mark.parametrize("lost", ["allowed.json", "both"])
def test_what_the_registry_s_host_is_told_to_type_when_it_has_lost_its_keys_is_enough(head, lost):
    head.new("--host", "head", "-f", str(head.file))
    directory = head.home / "kvmesh" / "blue"
    if lost == "both":
        shutil.rmtree(directory)
    else:
        (directory / lost).unlink()
    with pytest.raises(BadKeys) as caught:
        head.settled("head")
    head.keys(*shlex.split(caught.value.do.split("`")[1])[2:])
    assert head.settled("head").keys


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: (path / "allowed.json").write_text("{"), r"allowed.json is damaged \(Input data was truncated"),
        (
            lambda path: (path / "allowed.json").write_text('{"version": 1, "hosts": []}'),
            "exactly one host",
        ),
        (
            lambda path: (path / "allowed.json").chmod(0o644),
            "allowed.json may be read or changed by other users: chmod",
        ),
        (lambda path: (path / "host.json").write_bytes(b"\xff\xfe"), "host.json is damaged"),
        (lambda path: path.chmod(0o755), "default may be read or changed by other users: chmod"),
        (lambda path: swap_halves(path), "secret key"),
    ],
)
def test_damaged_files_are_named_with_what_to_do(head, spoil, why):
    head.new("--host", "head", "--registry")
    spoil(head.home / "kvmesh" / "default")
    with pytest.raises(BadKeys, match=why):
        head.keys("ls")


def swap_halves(path):
    own, another = KeyDirectory(path).read_key(), HostKey.new("x")
    KeyDirectory(path).write_key(msgspec.structs.replace(own, public_key=another.public_key))


def test_which_host_and_which_file(head, monkeypatch):
    with pytest.raises(WrongUsage, match="not clear which host"):
        head.new()
    with pytest.raises(BadConfig, match="is not a host of"):
        head.new("--host", "pp", "-f", str(head.file))
    with pytest.raises(WrongUsage, match="needs a topology file"):
        head.keys("new", "--all-hosts")
    with refused(BadKeys, "this host has no keys", do="--name green"):
        head.keys("ls", "--name", "green")
    monkeypatch.setenv("KVMESH_HOST", "p")
    made = json.loads(head.keys("new", "-f", str(head.file), "-o", "json")[0])
    assert (made["host"], made["mesh"]) == ("p", "blue")
    assert head.listed("-f", str(head.file))["version"] is None


def test_keys_of_all_hosts_of_a_file(head):
    where = head.home / "all"
    arguments = ("new", "--all-hosts", "-f", str(head.file), "--keys", str(where))
    assert "made keys for head, p, d" in head.keys(*arguments)[1]
    directories = {host: KeyDirectory(where / host) for host in ("head", "p", "d")}
    lists = {host: directory.read_allowed() for host, directory in directories.items()}
    assert lists["head"] == lists["p"] == lists["d"]
    for host, directory in directories.items():
        assert lists["head"].host(host).public_key == directory.read_key().public_key
        assert head.settled(host, KVMESH_KEYS=str(where / host)).keys == str(where / host)
    # Again: nothing is made anew, and who was revoked meanwhile stays so; who comes to the file is added.
    head.keys("revoke", "p", "--keys", str(where / "head"))
    head.file.write_text(HOSTS + "[hosts.d2]\naddress = '10.0.0.4'\ndecode = 1\n")
    said = head.keys(*arguments)[1]
    assert "made keys for d2:" in said
    assert "host p is not on the list, as after `keys revoke`" in said
    now = directories["head"].read_allowed()
    assert [one.host for one in now.hosts] == ["d", "d2", "head"]
    assert KeyDirectory(where / "d2").read_allowed() == directories["d"].read_allowed() == now
    assert "all hosts have keys" in head.keys(*arguments)[1]
    assert directories["head"].read_allowed() == now
    head.keys(*shlex.split(said.split("`")[-2])[2:])
    assert directories["head"].read_allowed().host("p").public_key == directories["p"].read_key().public_key


@pytest.mark.parametrize("before", [("p",), ("p", "d"), ("head", "p", "d")])
def test_a_host_that_had_keys_before_those_of_all_hosts_is_on_the_list_with_them(head, before):
    where = head.home / "all"
    had = {host: head.new("-f", str(head.file), "--host", host, "--keys", str(where / host)) for host in before}
    said = head.keys("new", "--all-hosts", "-f", str(head.file), "--keys", str(where))[1]
    assert "host p had keys already, and is on the list with them now" in said
    lists = [KeyDirectory(where / host).read_allowed() for host in ("head", "p", "d")]
    assert [one.host for one in lists[0].hosts] == ["d", "head", "p"]
    assert lists[1:] == [lists[0], lists[0]]
    assert all(lists[0].host(host).public_key == key for host, key in had.items())


def test_of_a_host_with_a_new_pair_all_hosts_lists_the_new_key_with_the_roles_it_had(head):
    where = head.home / "all"
    arguments = ("new", "--all-hosts", "-f", str(head.file), "--keys", str(where))
    head.keys(*arguments)
    old = KeyDirectory(where / "p").read_key().public_key
    head.keys("add", "p", old, "--roles", "worker,supervisor", "--keys", str(where / "head"))
    new = head.new("-f", str(head.file), "--host", "p", "--force", "--keys", str(where / "p"))
    head.keys(*arguments)
    listed = KeyDirectory(where / "head").read_allowed().host("p")
    assert (listed.public_key, listed.roles) == (new, ("worker", "supervisor"))


def test_all_hosts_takes_no_pair_of_another_host(head):
    where = head.home / "all"
    head.new("-f", str(head.file), "--host", "d", "--keys", str(where / "p"))
    with refused(BadKeys, "host p cannot use the keys", why="they belong to host d"):
        head.keys("new", "--all-hosts", "-f", str(head.file), "--keys", str(where))


def test_a_host_beyond_the_loopback_needs_keys_or_the_word_insecure(head):
    new = "`meshctl keys new --host p --name blue`"
    with refused(BadKeys, r"p has no keys, and may not listen on 0\.0\.0\.0", do=(new, "--insecure")):
        head.settled("p")
    insecure = head.settled("p", KVMESH_INSECURE="true", KVMESH_KEYS="/not/here")
    assert (insecure.keys, links_note(insecure)) == ("", INSECURE)
    # On one machine they are plain without a word; whoever names a directory means keys.
    head.file.write_text(HOSTS.replace("address", "bind = '127.0.0.1'\naddress"))
    plain = head.settled("p")
    assert plain.keys == ""
    assert "unencrypted, but on loopback only" in links_note(plain)
    with pytest.raises(BadKeys, match="has no keys"):
        head.settled("p", KVMESH_KEYS="/not/here")


def test_keys_of_another_host_or_mesh_are_refused(head):
    head.new("--host", "d", "-f", str(head.file))
    with pytest.raises(BadKeys, match="they belong to host d"):
        head.settled("p")
    head.keys("add", "p", HostKey.new("p").public_key, "--roles", "registry", "--name", "blue")
    with pytest.raises(BadKeys, match="the registry on host p, but here it is on head"):
        head.settled("d")
    directory = KeyDirectory(head.home / "kvmesh" / "blue")
    directory.allowed_file.unlink()
    head.new("--host", "head", "-f", str(head.file), "--force")
    directory.write_key(HostKey.new("head"))
    with refused(BadKeys, "different public keys", do="--force"):
        head.settled("head")
