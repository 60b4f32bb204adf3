"""A host's keys as files: who may read them, and when a list that was replaced is seen."""

import os
from unittest.mock import Mock

import pytest

from mesh.membership.keys import AllowList, HostKey
from mesh.runtime import key_files
from mesh.runtime.key_files import KeyDirectory, KeyFileError, KeyRing


@pytest.fixture
def directory(tmp_path):
    return KeyDirectory(tmp_path / "keys")


def a_list(own):
    return AllowList(0, ()).with_host(own.host, own.public_key, ("registry", "*"))


@pytest.fixture
def ring(directory):
    """Of a host that has its key and a list."""
    own = HostKey.new("head")
    directory.write_key(own)
    directory.write_allowed(a_list(own))
    return KeyRing(directory)


def test_a_ring_needs_both_files_and_sees_what_is_replaced(directory):
    assert directory.read_key() is directory.read_allowed() is None
    own = HostKey.new("head")
    with pytest.raises(KeyFileError, match=r"host.json does not exist: make keys with `meshctl keys new`"):
        KeyRing(directory)
    directory.write_key(own)
    with pytest.raises(KeyFileError, match=r"allowed.json does not exist"):
        KeyRing(directory)
    first = a_list(own)
    directory.write_allowed(first)
    ring = KeyRing(directory)
    assert (ring.own, ring.allowed, ring.poll()) == (own, first, False)
    second = first.with_host("d", HostKey.new("d").public_key)
    directory.write_allowed(second)
    assert (ring.poll(), ring.allowed, ring.poll()) == (True, second, False)


def test_a_list_that_is_damaged_or_gone_leaves_the_one_before(directory, ring):
    directory.allowed_file.write_text('{"version": 9, "hosts": []}')
    assert (ring.poll(), ring.allowed) == (False, a_list(ring.own))
    assert "allowed.json is damaged" in ring.trouble
    directory.allowed_file.unlink()
    assert not ring.poll()
    assert "put it back" in ring.trouble
    directory.write_allowed(a_list(ring.own))
    assert (ring.poll(), ring.trouble) == (False, "")


def test_files_that_others_may_read_and_links_are_not_read(directory, tmp_path):
    own = HostKey.new("head")
    directory.write_key(own)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.key_file.stat().st_mode & 0o777 == 0o600
    directory.key_file.chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod go-rwx"):
        directory.read_key()
    directory.key_file.rename(tmp_path / "elsewhere")
    directory.key_file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyFileError, match="cannot be read"):
        directory.read_key()


def test_a_lost_list_is_written_again_as_it_was_but_not_what_is_another_s_to_mend(directory, ring):
    assert ring.restore() == ""
    directory.allowed_file.write_text('{"version": 9')
    told = f"{directory.allowed_file} was damaged (Input data was truncated): the right file was written again"
    assert ring.restore() == told
    assert (directory.read_allowed(), ring.trouble, ring.restore()) == (a_list(ring.own), "", "")
    directory.allowed_file.unlink()
    assert ring.restore() == f"{directory.allowed_file} was gone: the right file was written again"
    assert directory.read_allowed() == a_list(ring.own)

    directory.allowed_file.write_text('{"version": 9')
    directory.path.chmod(0o750)
    assert ring.restore() == "", "others may have written it"
    assert "chmod go-rwx" in ring.trouble
    directory.path.chmod(0o700)
    directory.allowed_file.unlink()
    directory.key_file.unlink()
    assert ring.restore() == "", "whoever removes the pair as well means it"
    assert not directory.allowed_file.exists()


def test_a_list_that_cannot_be_written_again_is_written_when_it_can(directory, ring, monkeypatch):
    directory.allowed_file.write_text("")
    with monkeypatch.context() as full:
        full.setattr(key_files, "replace_file", Mock(side_effect=OSError(28, "No space left on device")))
        assert ring.restore() == ""
        assert "No space left" in ring.trouble
    assert ring.restore()
    assert (directory.read_allowed(), ring.trouble) == (a_list(ring.own), "")


def test_a_pipe_in_place_of_a_list_is_damage_which_is_mended(directory, ring):
    directory.allowed_file.unlink()
    os.mkfifo(directory.allowed_file, 0o600)
    writer = os.open(directory.allowed_file, os.O_RDWR)
    try:
        assert "was not a regular file: the right" in ring.restore()
    finally:
        os.close(writer)
    assert directory.read_allowed() == a_list(ring.own)
