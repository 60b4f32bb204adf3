"""The file of API keys: what its lines may say, who may read it, and what becomes of it while gateways run."""

import os

import pytest

from mesh.address import Endpoint
from mesh.membership.view import Member
from nodes.api_keys import entries
from nodes.api_keys.entries import ApiKey, BadApiKeys, KeyTable, digest_of, new_key, read_lines, read_plain, sha256_of
from nodes.api_keys.file import KeyFile, read_key_file, write_key_file
from nodes.api_keys.note import api_keys_notes

A, B = sha256_of("sk-a").hex(), sha256_of("sk-b").hex()


def test_a_file_has_a_key_a_line_with_limits_and_comments():
    text = f"# keys\n\nalice {A}\n  bob@x.org\t{B.upper()}  tokens=500 requests=3 # until May\n"
    alice, bob = ApiKey("alice", sha256_of("sk-a")), ApiKey("bob@x.org", sha256_of("sk-b"), 3, 500)
    assert read_lines(text) == (alice, bob)
    assert read_lines(entries.as_lines([bob, alice])) == (bob, alice)
    assert digest_of([alice, bob]) == digest_of([bob, alice]) != digest_of([alice])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no key in it"),
        ("# nobody\n\n", "there is no key in it"),
        (f"alice {A}\nalice {B}\n", "line 2 has the same name as line 1"),
        (f"alice {A}\n\nbob {A}\n", "line 3 has the same key as line 1"),
        ("alice\n", "line 1 must be a name and the SHA-256"),
        (f"alice {A[:-1]}\n", "64 hexadecimal digits"),
        (f"alice {A}00\n", "64 hexadecimal digits"),
        ("alice sk-secret\n", "64 hexadecimal digits"),
        (f"{A} alice\n", "64 hexadecimal digits"),
        (f"al!ce {A}\n", "line 1: a key's name has"),
        (f"{'a' * 65} {A}\n", "line 1: a key's name has"),
        (f"alice {A} requests=0\n", "requests=N and tokens=N"),
        (f"alice {A} requests=1 requests=2\n", "requests=N and tokens=N"),
        (f"alice {A} requests=-1\n", "requests=N and tokens=N"),
        (f"alice {A} weight=0\n", "weight=N"),
        (f"alice {A} weight=1001\n", "1 to 1000"),
        (f"alice {A} weight=2 weight=3\n", "weight=N"),
        (f"alice {A} seats=1\n", "requests=N and tokens=N"),
    ],
)
def test_a_file_with_a_broken_line_is_refused_and_never_quoted(text, why):
    with pytest.raises(BadApiKeys, match=why) as refused:
        read_lines(text)
    assert "sk-secret" not in str(refused.value)
    assert A[:8] not in str(refused.value)


def test_a_key_may_have_a_weight():
    (key,) = read_lines(f"paid {A} weight=1000 requests=2\n")
    assert (key.weight, key.requests) == (1000, 2)
    assert read_lines(key.line()) == (key,)
    assert read_lines(f"alice {A}\n")[0].weight == 1


def test_more_keys_than_allowed_are_refused(monkeypatch):
    monkeypatch.setattr(entries, "MAX_KEYS", 1)
    with pytest.raises(BadApiKeys, match="2 keys in it, more than 1"):
        read_lines(f"alice {A}\nbob {B}\n")


def test_the_environment_has_keys_themselves():
    assert read_plain("sk-a") == (ApiKey("key-1", sha256_of("sk-a")),)
    assert [key.name for key in read_plain(" alice:sk-a, sk-b\nbob:x:y ")] == ["alice", "key-2", "bob"]
    assert read_plain("bob:x:y")[0].sha256 == sha256_of("x:y")
    for text, why in (
        ("", "there is no key in it"),
        (" , ", "there is no key in it"),
        ("alice:", "entry 1 has no key"),
        ("a,a", "entry 2 has the same key as entry 1"),
        ("alice:a alice:b", "entry 2 has the same name as entry 1"),
        ("al!ce:secret", "entry 1: a key's name"),
    ):
        with pytest.raises(BadApiKeys, match=why) as refused:
            read_plain(text)
        assert "secret" not in str(refused.value)


def test_a_key_is_found_by_what_a_client_sends_and_by_nothing_else():
    keys = [ApiKey(f"k{number}", sha256_of(f"sk-{number}")) for number in range(100)]
    table = KeyTable(keys)
    assert all(table.find(f"sk-{number}".encode()) == key for number, key in enumerate(keys))
    wrong = [b"", b"sk-", b"sk-1 ", b"SK-1", b"sk-100", keys[0].sha256, keys[0].sha256.hex().encode(), b"\xff\x00" * 99]
    assert not any(map(table.find, wrong))
    first, second = new_key(), new_key()
    assert first != second
    assert len(first) == len("sk-") + 43


def test_a_file_that_others_may_read_or_that_is_none_is_refused(tmp_path):
    path = tmp_path / "keys"
    with pytest.raises(BadApiKeys, match="No such file"):
        read_key_file(path)
    write_key_file(path, read_lines(f"alice {A}"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [key.name for key in read_key_file(path)] == ["alice"]
    for mode in (0o640, 0o604, 0o620, 0o610):
        path.chmod(mode)
        with pytest.raises(BadApiKeys, match="may be read or changed by other users: chmod go-rwx"):
            read_key_file(path)
    path.chmod(0o600)
    path.write_bytes(b"alice \xff")
    with pytest.raises(BadApiKeys, match="is not text"):
        read_key_file(path)
    path.write_bytes(b"#" * ((4 << 20) + 1))
    with pytest.raises(BadApiKeys, match="more than 4 MiB"):
        read_key_file(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    for odd, why in ((path, "not a regular file"), (tmp_path, "Is a directory")):
        with pytest.raises(BadApiKeys, match=why):
            read_key_file(odd)


def test_a_file_is_read_again_when_it_has_changed_and_what_is_broken_changes_nothing(tmp_path):
    path = tmp_path / "keys"
    write_key_file(path, read_lines(f"alice {A}"))
    file = KeyFile(path)
    assert not file.poll()
    path.write_text(f"alice {A}\nbob {B}\n")
    assert file.poll()
    assert file.find(b"sk-b").name == "bob"
    assert (file.num_keys, file.trouble) == (2, "")
    digest = file.digest
    for spoil in (
        lambda: path.write_text(""),
        lambda: path.write_text("alice\n"),
        lambda: path.chmod(0o644),
        path.unlink,
    ):
        spoil()
        assert file.poll()
        assert not file.poll(), "it is told once"
        assert file.trouble
        assert (file.digest, file.find(b"sk-a").name) == (digest, "alice")
    write_key_file(path, read_lines(f"bob {B}"))
    assert file.poll()
    assert (file.trouble, file.find(b"sk-a")) == ("", None)
    assert (file.revoked(b"sk-a"), file.revoked(b"sk-b"), file.revoked(b"sk-c")) == ("alice", "", "")
    path.touch()
    assert not file.poll(), "the same keys are no news"
    path.write_text(f"bob {B}\nalice {A}\n")
    assert file.poll()
    assert file.revoked(b"sk-a") == "", "it is back"


def test_only_so_many_revoked_keys_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr("nodes.api_keys.file.MAX_KEYS", 3)
    path = tmp_path / "keys"
    write_key_file(path, read_lines(f"k0 {sha256_of('k0').hex()}"))
    file = KeyFile(path)
    for number in range(1, 7):
        path.write_text(f"k{number} {sha256_of(f'k{number}').hex()}  # {'x' * number}\n")
        assert file.poll()
    assert [file.revoked(b"k%d" % number) for number in range(7)] == ["", "", "", "k3", "k4", "k5", ""]


def gateway(actor_id, **attributes):
    return Member(actor_id=actor_id, role="gateway", epoch=1, endpoint=Endpoint("", ""), attributes=attributes)


def test_people_are_told_where_keys_differ_or_are_lacking():
    same = [gateway("gateway-0.a", api_keys="1"), gateway("gateway-0.b", api_keys="1")]
    assert api_keys_notes(same) == []
    assert api_keys_notes([gateway("gateway-0"), gateway("gateway-1", url="http://x")]) == []
    (lacking,) = api_keys_notes([*same, gateway("gateway-0.c")])
    assert lacking.startswith("no API key is asked for by gateway-0.c:")
    (differing,) = api_keys_notes([*same, gateway("gateway-0.c", api_keys="2")])
    assert differing.endswith("the same file: gateway-0.a, gateway-0.b; gateway-0.c")
    trouble = gateway("gateway-0.c", api_keys="1", api_keys_trouble="it is gone")
    assert api_keys_notes([*same, trouble]) == ["gateway-0.c goes on with the API keys that it had: it is gone"]
    assert api_keys_notes([*same, gateway("gateway-x", api_keys=["mine"])]) == []


def test_an_admin_is_one_by_a_word_of_the_line_or_of_the_entry() -> None:
    line = f"ops {sha256_of('sk-ops').hex()} tokens=9 admin"
    (key,) = read_lines(f"{line}\n")
    assert (key.admin, key.tokens, key.line()) == (True, 9, line)
    assert not read_lines(f"ops {sha256_of('sk-ops').hex()}")[0].admin
    assert digest_of((key,)) != digest_of(read_lines(line.removesuffix(" admin")))
    with pytest.raises(BadApiKeys):
        read_lines(f"{line} admin")
    plain = read_plain("admin=ops:sk-ops, alice:admin=x sk-third")
    assert [(one.name, one.admin) for one in plain] == [("ops", True), ("alice", False), ("key-3", False)]
    assert plain[0].sha256 == key.sha256
    for wrong in ("admin=:sk", "admin=ops:", "admin=o*ps:sk"):
        with pytest.raises(BadApiKeys):
            read_plain(wrong)
