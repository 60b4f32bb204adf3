"""Keeping pages on disk, as far as `meshctl up` can say before anything runs that it will or will not work."""

import os
from pathlib import Path
from typing import Any

import pytest

from cli.errors import BadConfig, NoMemory
from cli.plan.disk import DiskFound, look_at_disk
from cli.plan.settings import DiskSettings, KVSettings, Settings
from cli.plan.sources import load_settings
from cli.plan.topology import Topology, plan_topology
from kvstore.store.directory import open_files
from kvstore.store.place import StoreIdentity
from nodes.model_spec import resolve_model
from tests.cli.launches import MACHINE, configs
from tests.cli.refused import refused

MODEL = "random:tiny-qwen2"
SIZE = 1 << 20
DISK = DiskSettings(directory="/disk", size="1MiB", write="100KiB")


def planned(disk: DiskSettings = DISK, found: DiskFound | None = None, model: str = MODEL, **more: Any) -> Topology:
    settings = Settings(model=model, kv=KVSettings(disk=disk), **more)
    return plan_topology(settings, resolve_model(model), model, MACHINE._replace(disk=found))


def identity(**changes: Any) -> StoreIdentity:
    layout = resolve_model(MODEL).kv_layout("float32", 16)
    fields = {"host": "", "layout_digest": layout.digest, "page_bytes": layout.page_bytes, "numerics": "any"}
    return StoreIdentity(**(fields | changes))


def test_without_the_setting_nothing_is_kept() -> None:
    topology = planned(DiskSettings())
    assert [agent.disk for agent in configs(topology, "kv_agent")] == [None]
    assert {scheduler.stores for scheduler in configs(topology, "scheduler")} == {""}
    words = str([launch.config for launch in topology.actors])
    assert "disk" not in words
    assert "stores" not in words


def test_agent_and_schedulers_are_told() -> None:
    for policy in ("write_through", "write_through_selective"):
        topology = planned(DiskSettings(directory="/disk", size="1MiB", write="100KiB", policy=policy))
        (agent,) = configs(topology, "kv_agent")
        assert (agent.disk.directory, agent.disk.size_bytes) == ("/disk", SIZE)
        assert (agent.disk.bytes_per_s, agent.disk.host) == (100 << 10, "")
        assert {scheduler.stores for scheduler in configs(topology, "scheduler")} == {policy}


def test_groups_of_unlike_ranks_share_what_was_given() -> None:
    (agent,) = configs(planned(prefill_tp=2, decode_tp=1), "kv_agent")
    assert agent.disk.size_bytes == SIZE // 2
    (agent,) = configs(planned(tp=2), "kv_agent")
    assert agent.disk.size_bytes == SIZE


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"kv__disk__directory": "/disk"}, "--kv-disk has no size", "--kv-disk-size 20GiB"),
        ({"kv__disk__size": "1GiB"}, "how large, but not where", "--kv-disk"),
        ({"kv__disk__directory": "/d", "kv__disk__size": "0"}, "has no size", "--kv-disk-size"),
        ({"kv__disk__directory": "/d", "kv__disk__size": "much"}, "--kv-disk-size cannot[^$]*size is 'much'", "512MiB"),
        (
            {"kv__disk__directory": "/d", "kv__disk__size": "1G", "kv__disk__write": "-1"},
            "--kv-disk-write cannot[^$]*write is '-1'",
            "512MiB",
        ),
        ({"kv__disk__write": "fast"}, "--kv-disk-write cannot[^$]*write is 'fast'", "512MiB"),
    ],
)
def test_settings_that_cannot_be_used(options: dict[str, str], what: str, do: str) -> None:
    with refused(BadConfig, what, do=do):
        load_settings(None, {}, options)


def test_every_source_sets_it(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[kv.disk]\ndirectory = "/one"\nsize = "1GiB"\n')
    settings = load_settings(file, {"KVMESH_KV__DISK__SIZE": "2GiB"}, {"kv__disk__directory": "/two"})
    assert (settings.kv.disk.directory, settings.kv.disk.size_bytes) == ("/two", 2 << 30)
    with refused(BadConfig, "KVMESH_KV__DISK__POLICY", why="must be one of write_through, write_through_selective"):
        load_settings(None, {"KVMESH_KV__DISK__POLICY": "write_back"}, {})


def test_pages_that_cannot_be_kept() -> None:
    with refused(
        BadConfig, "--kv-disk cannot be used with --device cuda:0", why="on a device", do="leave --kv-disk out"
    ):
        planned(device="cuda:0")
    with refused(BadConfig, "cannot be used again", why="whole input", do="leave --kv-disk out"):
        planned(model="random:tiny-bert")
    with refused(BadConfig, "1000 is too small", why="holds no page", do="--kv-disk-size"):
        planned(DiskSettings(directory="/disk", size="1000"))
    with refused(BadConfig, "disk cannot be set", do="kv.disk"):
        planned(roles={"kv_agent": {"disk": None}})


def test_room_is_looked_for_before_the_start(tmp_path: Path) -> None:
    with refused(NoMemory, "do not fit into /disk", why=("another ", "but only 5 are free"), do="make room"):
        planned(found=DiskFound(5))
    planned(found=DiskFound(SIZE))
    # What a store of these pages has already need not be free, however they were computed; others' stores must stay.
    tmp_path.chmod(0o700)
    files = open_files(tmp_path, identity(numerics="old"), SIZE)
    other = open_files(tmp_path, identity(layout_digest=b"o" * 16), SIZE)
    found = look_at_disk(str(tmp_path))
    assert len(found.stores) == 2
    planned(found=found._replace(free_bytes=8192))
    others = [store for store in found.stores if store.identity != identity(numerics="old")]
    with refused(NoMemory, why=str(others[0].path)):
        planned(found=DiskFound(8192, others))
    files.close()
    other.close()


def test_where_pages_cannot_be_kept(tmp_path: Path) -> None:
    with refused(BadConfig, "cannot be kept in", why="No such file", do="local disk"):
        look_at_disk(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with refused(BadConfig, why="is no directory"):
        look_at_disk(str(tmp_path / "file"))
    with refused(BadConfig, why="Not a directory"):
        look_at_disk(str(tmp_path / "file" / "below"))
    tmp_path.chmod(0o777)
    with refused(BadConfig, why="nobody else can write"):
        look_at_disk(str(tmp_path))
    tmp_path.chmod(0o700)
    assert look_at_disk(str(tmp_path)).free_bytes > 0


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    # Root, as which tests may run, could write anywhere.
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with refused(BadConfig, why="cannot write there"):
        look_at_disk(str(tmp_path))
