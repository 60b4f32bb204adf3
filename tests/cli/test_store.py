"""Keeping pages in a store that another package brings, as far as `meshctl up` can say before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from cli.errors import BadConfig
from cli.plan.settings import DiskSettings, KVSettings, Settings, StoreSettings
from cli.plan.sources import load_settings
from cli.plan.topology import Topology, plan_topology
from nodes.model_spec import resolve_model
from tests.cli.launches import MACHINE, configs
from tests.cli.refused import refused
from tests.kvstore.store.installed import distribution

MODEL = "random:tiny-qwen2"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in distribution.write_example(tmp_path / "site"):
        monkeypatch.syspath_prepend(path)


def planned(store: StoreSettings, model: str = MODEL, **more: Any) -> Topology:
    settings = Settings(model=model, kv=KVSettings(store=store), **more)
    return plan_topology(settings, resolve_model(model), model, MACHINE)


def test_agent_and_schedulers_are_told() -> None:
    for policy in ("write_through", "write_through_selective"):
        store = StoreSettings(name="folder", options={"path": "/x"}, deadline_s=2.0, write="100KiB", policy=policy)
        topology = planned(store)
        (agent,) = configs(topology, "kv_agent")
        assert agent.disk is None
        assert (agent.store.name, agent.store.options) == ("folder", {"path": "/x"})
        assert (agent.store.deadline_s, agent.store.bytes_per_s) == (2.0, 100 << 10)
        assert {scheduler.stores for scheduler in configs(topology, "scheduler")} == {policy}
    topology = planned(StoreSettings())
    assert [agent.store for agent in configs(topology, "kv_agent")] == [None]
    assert {scheduler.stores for scheduler in configs(topology, "scheduler")} == {""}
    assert "store'" not in str([launch.config for launch in topology.actors])


def test_every_source_sets_it(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[kv.store]\nname = "one"\nwrite = "1MiB"\n[kv.store.options]\npath = "/one"\nnum = 3\n')
    environment = {"KVMESH_KV__STORE__OPTIONS__PATH": "/two", "KVMESH_KV__STORE__DEADLINE_S": "2.5"}
    store = load_settings(file, environment, {"kv__store__name": "two"}).kv.store
    assert (store.name, store.options, store.deadline_s) == ("two", {"path": "/two", "num": 3}, 2.5)
    assert store.bytes_per_s == 1 << 20


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"kv__store__name": "a", "kv__disk__directory": "/d", "kv__disk__size": "1G"}, "both given", "one of them"),
        ({"kv__store__write": "fast"}, "'fast'", "512MiB"),
    ],
)
def test_settings_that_cannot_be_used(options: dict[str, str], what: str, do: str) -> None:
    with refused(BadConfig, what, do=do):
        load_settings(None, {}, options)


def test_options_for_nobody() -> None:
    with refused(BadConfig, "has options, but no name", do="--kv-store"):
        load_settings(None, {"KVMESH_KV__STORE__OPTIONS__PATH": "/x"}, {})
    with refused(BadConfig, "kv.store.deadline_s|KVMESH_KV__STORE__DEADLINE_S", why="deadline_s"):
        load_settings(None, {"KVMESH_KV__STORE__DEADLINE_S": "0"}, {})


def test_pages_that_cannot_be_kept() -> None:
    store = StoreSettings(name="folder")
    with refused(BadConfig, "there is no store foldr", why="installed are: folder", do="install the package"):
        planned(StoreSettings(name="foldr"))
    with refused(BadConfig, "--kv-store cannot be used with --device cuda:0", why="on a device", do="--kv-store out"):
        planned(store, device="cuda:0")
    with refused(BadConfig, "cannot be used again", why="whole input", do="leave --kv-store out"):
        planned(store, model="random:tiny-bert")
    with refused(BadConfig, "store cannot be set", do="kv.store"):
        planned(StoreSettings(), roles={"kv_agent": {"store": None}})


def test_the_key_of_values_is_looked_at_before_anything_runs(tmp_path: Path) -> None:
    key = tmp_path / "pool.key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    (agent,) = configs(planned(StoreSettings(name="folder", key_file=str(key))), "kv_agent")
    assert agent.store.key_file == str(key), "not what is in it: configurations lie in files"
    key.chmod(0o644)
    with refused(BadConfig, "cannot be signed", why="chmod 600", do="key_file"):
        planned(StoreSettings(name="folder", key_file=str(key)))
    with refused(BadConfig, "has a key_file, but no name", do="--kv-store"):
        load_settings(None, {"KVMESH_KV__STORE__KEY_FILE": str(key)}, {})


def test_by_which_policy_pages_are_kept() -> None:
    store = StoreSettings(name="folder", policy="write_through_selective")
    assert KVSettings(store=store).stores == "write_through_selective"
    assert KVSettings(disk=DiskSettings(directory="/d", size="1G"), store=StoreSettings()).stores == "write_through"
    assert KVSettings().stores == ""
