import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import (
    PoolBusy,
    PoolClosed,
    PoolDenied,
    PoolExhaustedMemory,
    PoolForeign,
    PoolMismatch,
    PoolMissing,
    PoolTorn,
)
from kvstore.layout import KVLayout
from kvstore.pool import header as pool_header
from kvstore.pool.header import incarnation_of, is_later
from kvstore.pool.mapping import map_pool
from kvstore.pool.page_pool import HEADER_BYTES, HeapHost, MemoryHost, PoolInfo, ShmHost
from kvstore.protocol import PoolHandle

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, fingerprint="weights")
INFO = PoolInfo(group="decode-0", num_pages=5, layout=LAYOUT, incarnation=7)


@pytest.fixture
def shm(tmp_path: Path) -> ShmHost:
    return ShmHost(tmp_path)


@pytest.fixture
def left(shm: ShmHost) -> str:
    """Where a pool lies whose owner is gone."""
    pool = shm.create("kv-a", INFO)
    pool.close()
    return pool.path


def test_a_pool_is_one_memory_for_all_who_map_it(host: MemoryHost) -> None:
    owner = host.create("kv-a", INFO)
    assert owner.path == host.path("kv-a")
    worker = host.open(owner.path, writable=True)
    agent = host.open(owner.path, writable=False)
    assert worker.info == agent.info == INFO
    assert (worker.table_view.readonly, agent.table_view.readonly) == (False, True)
    assert len(worker.pages_view) == 5 * LAYOUT.page_bytes
    assert not any(worker.pages_view)
    worker.page(3)[:3] = b"abc"
    assert bytes(agent.page(3)[:4]) == b"abc\0"
    assert bytes(agent.pages_view[3 * LAYOUT.page_bytes :][:3]) == b"abc"
    with pytest.raises(TypeError):
        agent.page(3)[0] = 1
    worker.table().write(3, PageEntry(PageState.RUNNING, 4, 2))
    assert agent.table().read(3) == PageEntry(PageState.RUNNING, 4, 2)
    for page in (-1, 5):
        with pytest.raises(IndexError, match="not in a pool of 5"):
            owner.page(page)
    for pool in (owner, worker, agent):
        pool.close()
        pool.close()
        with pytest.raises(PoolClosed):
            _ = pool.pages_view
    again = host.open(owner.path, writable=False, own=True)
    assert bytes(again.page(3)[:3]) == b"abc"
    again.close()
    host.unlink(owner.path)
    host.unlink(owner.path)
    with pytest.raises(PoolMissing, match="its kv_agent has not made it"):
        host.open(owner.path, writable=False)


def test_pages_are_aligned_and_the_header_says_where() -> None:
    assert INFO.table_offset % 4096 == INFO.pages_offset % 4096 == 0
    assert INFO.pages_offset >= INFO.table_offset + 5 * 2 * (64 + 4 * 16)
    assert INFO.file_bytes == INFO.pages_offset + 5 * LAYOUT.page_bytes


def test_a_header_that_does_not_fit_is_refused(host: MemoryHost) -> None:
    with pytest.raises(PoolMismatch, match="shorten its names"):
        host.create("kv-a", PoolInfo(group="g" * 5000, num_pages=2, layout=LAYOUT, incarnation=1))
    with pytest.raises(PoolMissing):
        host.open(host.path("kv-a"), writable=False)


def damage(host: MemoryHost, offset: int, data: bytes) -> str:
    """A pool whose header bytes are replaced from `offset` on."""
    pool = host.create("kv-a", INFO)
    # The whole of it, that the views are parts of.
    pool.pages_view.obj[offset : offset + len(data)] = data
    pool.close()
    return pool.path


@pytest.mark.parametrize(
    ("offset", "data", "error", "words"),
    [
        (0, b"ELF", PoolForeign, "not a KV pool"),
        (8, b"\x63", PoolForeign, "format 99"),
        (12, b"\xff\xff", PoolTorn, "damaged"),
        (30, b"\xff", PoolTorn, "damaged"),
    ],
)
def test_damaged_headers_are_told_apart(
    host: MemoryHost, offset: int, data: bytes, error: type[Exception], words: str
) -> None:
    path = damage(host, offset, data)
    for own in (False, True):
        with pytest.raises(error, match=words):
            host.open(path, writable=True, own=own)
    host.create("kv-a", INFO).close()
    host.open(path, writable=False).close()


# An unknown field of lists in lists: they fit a header three times as deep as the interpreter goes.
NESTED = b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0"


def header_around(body: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    with monkeypatch.context() as patch:
        patch.setattr(pool_header.msgspec.msgpack, "encode", lambda _: body)
        return pool_header.encode_header(INFO)


@pytest.mark.parametrize("body", [b"\xc0", NESTED], ids=["nil", "nested"])
def test_a_header_of_other_fields_is_torn(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    with pytest.raises(PoolTorn, match="cannot be read"):
        pool_header.decode_header(header_around(body, monkeypatch), "x", 10**9)


def test_short_files_are_torn(shm: ShmHost, left: str) -> None:
    for size, why in ((INFO.file_bytes - 1, "its header says"), (100, "creation was interrupted")):
        os.truncate(left, size)
        with pytest.raises(PoolTorn, match=why):
            shm.open(left, writable=False)
    assert HEADER_BYTES == 4096


@pytest.mark.parametrize("fields", [{"num_pages": 1}, {"num_pages": -5}, {"page_size": 0}, {"dtype": "int3"}])
def test_a_header_that_describes_no_pool_is_torn(
    host: MemoryHost, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = msgspec.to_builtins(INFO, builtin_types=(bytes,))
    layout = {name: value for name, value in fields.items() if name in sound["layout"]}
    body = msgspec.msgpack.encode(sound | fields | {"layout": sound["layout"] | layout})
    path = damage(host, 0, header_around(body, monkeypatch))
    with pytest.raises(PoolTorn, match="describes no pool"):
        host.open(path, writable=True)


def somebody_elses(path: Path) -> None:
    path.write_bytes(b"theirs")
    path.chmod(0o600)
    os.chown(path, 12345, 12345)


OTHERS = {
    "a directory": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("/dev/null"),
    "a pipe": os.mkfifo,
    "another user's": somebody_elses,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_not_this_users_is_neither_used_nor_removed(shm: ShmHost, make: Callable[[Path], object]) -> None:
    path = shm.directory / "kv-a"
    try:
        make(path)
    except PermissionError:
        pytest.skip("only root can give files away")
    for own in (False, True):
        with pytest.raises(PoolDenied, match="another --name"):
            shm.open(str(path), writable=True, own=own)
    with pytest.raises(PoolDenied, match="another --name"):
        shm.create("kv-a", INFO)
    assert shm.sweep("kv-") == []
    assert os.path.lexists(path)


def test_a_segment_that_others_may_open_is_foreign(shm: ShmHost, left: str) -> None:
    os.chmod(left, 0o644)
    with pytest.raises(PoolForeign, match="can be opened by other users"):
        shm.open(left, writable=True)
    assert shm.sweep("kv-") == [left]


@pytest.mark.parametrize(
    "told",
    [
        {"group": "prefill-0"},
        {"num_pages": 4},
        {"incarnation": 8},
        {"layout": msgspec.structs.replace(LAYOUT, fingerprint="other weights")},
        {"layout": msgspec.structs.replace(LAYOUT, page_size=8)},
    ],
)
def test_only_the_pool_that_its_agent_names_is_mapped(host: MemoryHost, told: dict[str, object]) -> None:
    path = host.create("kv-a", INFO).path
    fields = {"group": "decode-0", "num_pages": 5, "layout": LAYOUT, "incarnation": 7}
    map_pool(host, PoolHandle(agent="a", path=path, **fields)).close()
    with pytest.raises(PoolMismatch, match=f"has {next(iter(told))}"):
        map_pool(host, PoolHandle(agent="a", path=path, **(fields | told)))


def test_the_owner_keeps_others_out_until_it_closes(shm: ShmHost) -> None:
    owner = shm.create("kv-a", INFO)
    for use in (lambda: shm.create("kv-a", INFO), lambda: shm.open(owner.path, writable=True, own=True)):
        with pytest.raises(PoolBusy, match="belongs to another process"):
            use()
    assert shm.sweep("kv-") == []
    owner.close()
    heir = shm.open(owner.path, writable=True, own=True)
    assert shm.sweep("kv-") == []
    heir.close()
    assert shm.sweep("kv-other") == []
    assert shm.sweep("kv-") == [owner.path]
    assert list(shm.directory.iterdir()) == []


def test_a_view_that_outlives_its_pool_keeps_memory_but_not_the_lock(shm: ShmHost) -> None:
    pool = shm.create("kv-a", INFO)
    page = pool.page(1)
    whole = memoryview(pool.pages_view)
    page[0] = 9
    pool.close()
    assert (page[0], whole[LAYOUT.page_bytes]) == (9, 9)
    assert shm.sweep("kv-") == [pool.path]


def test_too_little_memory_is_said_at_once_in_figures(shm: ShmHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with(code: int) -> None:
        def failing(descriptor: int, offset: int, length: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", failing)

    fail_with(errno.ENOSPC)
    with pytest.raises(PoolExhaustedMemory, match="fewer pages") as caught:
        shm.create("kv-a", INFO)
    assert caught.value.needed_bytes == INFO.file_bytes
    assert caught.value.available_bytes > 0
    assert list(shm.directory.iterdir()) == []
    fail_with(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        shm.create("kv-a", INFO)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
def test_a_real_memory_file_system_refuses_what_it_does_not_have() -> None:
    shm = ShmHost()
    status = os.statvfs("/dev/shm")
    num_pages = 2 * status.f_blocks * status.f_frsize // LAYOUT.page_bytes
    name = f"kvmesh-test-{os.getpid()}"
    with pytest.raises(PoolExhaustedMemory):
        shm.create(name, PoolInfo(group="g", num_pages=num_pages, layout=LAYOUT, incarnation=1))
    assert not [path for path in os.listdir("/dev/shm") if path.startswith(name)]


@pytest.mark.process
def test_the_pool_of_a_killed_owner_is_a_leftover(shm: ShmHost) -> None:
    """kill -9 drops the lock and nothing else; one cut short in its making is swept too."""
    program = (
        "import sys; from kvstore.pool.page_pool import *; from kvstore.layout import KVLayout\n"
        "host = ShmHost(sys.argv[1])\n"
        "layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8)\n"
        "info = PoolInfo(group='g', num_pages=4, layout=layout, incarnation=3)\n"
        "pool = host.create('kv-a', info); pool.page(2)[:5] = b'alive'\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(shm.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin
    assert owner.stdout
    assert owner.stdout.readline() == b"ready\n"
    assert shm.sweep("kv-") == []
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    pool = shm.open(shm.path("kv-a"), writable=True, own=True)
    assert bytes(pool.page(2)[:5]) == b"alive"
    pool.close()
    Path(shm.path("kv-b.making.1")).touch()
    assert len(shm.sweep("kv-")) == 2


def test_heap_host_lists_its_pools() -> None:
    host = HeapHost()
    host.create("b", INFO)
    host.create("a", INFO)
    assert host.paths() == ["heap:a", "heap:b"]


def test_a_wish_is_written_over_the_header_and_a_freed_pool_is_only_that(host: MemoryHost) -> None:
    pool = host.create("p", INFO)
    pool.page(2)[:4] = b"kept"
    wished = msgspec.structs.replace(INFO, weights="reload", is_unwanted=True)
    host.mark(pool.path, wished)
    again = host.open(pool.path, writable=True)
    assert again.info == wished
    assert again.info.is_released
    assert bytes(again.page(2)[:4]) == b"kept", "until it is freed"
    again.close()
    pool.close()
    freed = msgspec.structs.replace(wished, is_freed=True)
    assert freed.file_bytes == HEADER_BYTES
    host.create("p", freed).close()
    found = host.open(pool.path, writable=False)
    assert (found.info, found.pages_view.nbytes, found.table_view.nbytes) == (freed, 0, 0)
    found.close()
    host.unlink(pool.path)
    with pytest.raises(PoolMissing):
        host.mark(pool.path, wished)


def test_makings_of_one_epoch_are_told_apart_and_come_after_those_before() -> None:
    made = [incarnation_of(epoch, number) for epoch in (1, 2, 9) for number in (0, 1, 5)]
    assert len(set(made)) == len(made)
    assert made[0] == 1, "the first of an epoch is called by it"
    for index, one in enumerate(made):
        assert [is_later(other, one) for other in made] == [place > index for place in range(len(made))]
