"""A Mooncake Store as an installed store, on a pool of the tests' own: every failure is a miss, and told apart."""

import os
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.errors import StoreUnmade
from kvstore.store.installed.identity import context_of
from kvstore.store.installed.plugins import load_store
from kvstore.store.mooncake import PAUSE_S, MooncakeStore, PoolFailed, make
from tests.kvstore.store.installed import distribution
from tests.kvstore.store.installed.unruly import IDENTITY, VALUES, page_of, value_of
from tests.kvstore.store.mooncake.fake_pool import FakePool

HASHES = [bytes([number]) * 16 for number in range(4)]
KEY = b"k" * 32


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(pool: FakePool, clock: Clock) -> MooncakeStore:
    return MooncakeStore(pool, "kv-1", clock)


def values(hashes: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(value_of(one, page_of(one))) for one in hashes]


def got(store: MooncakeStore, hashes: Sequence[bytes]) -> list[bytes | None]:
    buffers = [bytearray(VALUES.value_bytes) for _ in hashes]
    found = store.get(hashes, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) if is_there else None for buffer, is_there in zip(buffers, found, strict=True)]


def key_of(page_hash: bytes) -> str:
    return f"kv-1/{page_hash.hex()}"


def test_what_is_put_is_got_by_whoever_has_the_namespace(store: MooncakeStore, pool: FakePool) -> None:
    assert store.put(HASHES[:3], values(HASHES[:3])) == [True] * 3
    assert store.contains(HASHES) == [True, True, True, False]
    assert got(store, HASHES) == [*(bytes(value) for value in values(HASHES[:3])), None]
    other = MooncakeStore(pool, "kv-1")
    assert got(other, HASHES[1:2]) == [bytes(values(HASHES)[1])]
    foreign = MooncakeStore(pool, "kv-2")
    assert foreign.contains(HASHES) == [False] * 4
    assert got(foreign, HASHES[:1]) == [None], "what is not there is no failure"
    # It was read a moment ago, which does not keep what is wrong.
    store.remove([HASHES[0], HASHES[3]])
    assert store.contains(HASHES) == [False, True, True, False]
    store.close()
    assert pool.is_closed


def test_a_master_that_is_away_is_said_and_not_asked_again_at_once(
    store: MooncakeStore, pool: FakePool, clock: Clock
) -> None:
    store.put(HASHES[:3], values(HASHES[:3]))
    for ask in (
        lambda: store.contains(HASHES),
        lambda: got(store, HASHES),
        lambda: store.put(HASHES[3:], values(HASHES[3:])),
    ):
        pool.is_away = True
        with pytest.raises(PoolFailed, match="master does not answer"):
            ask()
        pool.is_away = False
        asked = pool.counts.total()
        clock.now += PAUSE_S - 0.1
        for again in (lambda: store.contains(HASHES), lambda: got(store, HASHES), lambda: store.remove(HASHES)):
            with pytest.raises(PoolFailed, match="not asked again"):
                again()
        assert pool.counts.total() == asked
        clock.now += 0.2
        assert store.contains(HASHES) == [True, True, True, False], "it is back"


def test_of_many_pages_one_is_tried_at_a_master_that_is_away(store: MooncakeStore, pool: FakePool) -> None:
    pool.is_away = True
    with pytest.raises(PoolFailed, match="put: -900"):
        store.put(HASHES, values(HASHES))
    assert pool.counts["put"] == 1, "each attempt takes seconds"


def test_a_key_with_an_empty_value_is_a_miss_and_makes_room_for_the_right_one(
    store: MooncakeStore, pool: FakePool
) -> None:
    store.put(HASHES[:2], values(HASHES[:2]))
    pool.values[key_of(HASHES[1])] = b""
    assert store.contains(HASHES[:2]) == [True, True]
    assert got(store, HASHES[:2]) == [bytes(values(HASHES)[0]), None]
    assert store.contains(HASHES[:2]) == [True, False]
    store.put(HASHES[1:2], values(HASHES[1:2]))
    assert got(store, HASHES[1:2]) == [bytes(values(HASHES)[1])]


def test_a_host_that_does_not_answer_keeps_what_it_has(store: MooncakeStore, pool: FakePool) -> None:
    store.put(HASHES, values(HASHES))
    pool.silent = {key_of(HASHES[2]), key_of(HASHES[3])}
    assert got(store, HASHES) == [*(bytes(value) for value in values(HASHES[:2])), None, None]
    with pytest.raises(PoolFailed, match="2 values are there and empty, or on a host that does not answer"):
        got(store, HASHES[2:])
    pool.silent = set()
    assert got(store, HASHES[2:]) == [bytes(value) for value in values(HASHES[2:])]


def test_a_pool_that_is_full(store: MooncakeStore, pool: FakePool) -> None:
    pool.has_room = 2
    assert store.put(HASHES, values(HASHES)) == [True, True, False, False]
    with pytest.raises(PoolFailed, match="put: -200, no host has room"):
        store.put(HASHES[2:], values(HASHES[2:]))
    assert store.put(HASHES[:1], values(HASHES[:1])) == [True], "what is there needs no room"


@pytest.mark.parametrize("length", [1, VALUES.value_bytes // 2, VALUES.value_bytes + 1])
def test_a_value_of_another_length_is_judged_and_so_removed(store: MooncakeStore, pool: FakePool, length: int) -> None:
    pool.values[key_of(HASHES[0])] = bytes(values(HASHES)[0]).ljust(length, b"x")[:length]
    (value,) = got(store, HASHES[:1])
    assert value is not None
    assert (VALUES.open(HASHES[0], value) is None) == (length < VALUES.value_bytes)


# making it


class Config:
    """Of the package; what the file says."""

    local_hostname, metadata_server, master_server_address = "a", "P2PHANDSHAKE", "etcd://m:50051"
    global_segment_size, local_buffer_size, protocol, device_name = 1 << 20, 2 << 20, "tcp", None
    enable_ssd_offload, ssd_offload_path, tenant_id = False, "", "default"
    enable_client_http_server, client_http_port = False, 9300
    load_from_env = classmethod(lambda cls: cls())


class Client(FakePool):
    code = 0
    num_closed = 0
    said: tuple[Any, ...] = ()
    waits_ms = ""

    def setup(self, *arguments: Any) -> int:
        type(self).said = arguments
        type(self).waits_ms = os.environ["MC_RPC_TIMEOUT_MS"]
        return self.code

    def close(self) -> int:
        type(self).num_closed += 1
        return 0


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    """Two modules in the place of the package's."""
    for name in ("MC_LOG_LEVEL", "MC_RPC_TIMEOUT_MS", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "7")
    config, client = types.ModuleType("mooncake.mooncake_config"), types.ModuleType("mooncake.store")
    made = type("Client", (Client,), {})
    config.MooncakeConfig, client.MooncakeDistributedStore = Config, made  # type: ignore[attr-defined]
    for module in (types.ModuleType("mooncake"), config, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_it_is_told_what_its_file_says_and_waits_less_than_a_call_may_take(package: type[Client]) -> None:
    store = make(context_of(IDENTITY, 8.0, {}, KEY))
    assert package.said == (
        "a", "P2PHANDSHAKE", 1 << 20, 2 << 20, "tcp", "", "etcd://m:50051", None, False, "", "default", False, 9300
    )  # fmt: skip
    assert package.waits_ms == "1250", "in which other threads may have to wait"
    assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "2"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "7", "what is set is not changed"
    assert store.put(HASHES[:1], values(HASHES[:1])) == [True]


def test_without_a_key_or_with_options_or_without_a_master_it_is_not_made(package: type[Client]) -> None:
    with pytest.raises(ValueError, match=r"change values.*key_file"):
        make(context_of(IDENTITY, 5.0, {}))
    with pytest.raises(ValueError, match=r"no options.*path.*MOONCAKE_CONFIG_PATH"):
        make(context_of(IDENTITY, 5.0, {"path": "/x"}, KEY))
    package.code = -1
    with pytest.raises(ConnectionError, match=r"m:50051 \(-1\): does it run"):
        make(context_of(IDENTITY, 5.0, {}, KEY))


def test_a_master_that_does_not_listen_is_not_left_to_mooncake(
    package: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, nothing else in the process runs for seconds, and the supervisor replaces the agent."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*listener.getsockname())
        monkeypatch.setattr(Config, "master_server_address", address)
        with pytest.raises(ConnectionError, match=f"no master at {address}"):
            make(context_of(IDENTITY, 5.0, {}, KEY))
        assert package.said == ()
        listener.listen()
        store, other = make(context_of(IDENTITY, 5.0, {}, KEY)), make(context_of(IDENTITY, 5.0, {}, KEY))
        store.close()
    assert package.num_closed == 1
    other.close()
    assert package.num_closed == 1, "nobody is there to be told"


def test_without_the_package_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("site") / "site"
    distribution.write(folder, {"pool": "kvstore.store.mooncake:make"})
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(StoreUnmade, match=r"kvmesh\[mooncake\].*libibverbs1"):
        load_store("pool", context_of(IDENTITY, 5.0, {}, KEY))
