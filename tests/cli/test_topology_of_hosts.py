import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.commands.config import show, topology_schema
from cli.errors import BadConfig, NoMemory
from cli.plan.hosts import HostSettings, check_hosts
from cli.plan.settings import KVSettings, Settings
from cli.plan.sources import load_settings
from cli.plan.topology import Machine, plan_topology
from mesh.address import HOST_NAME, host_of
from nodes.model_spec import resolve_model
from nodes.roles import KV_AGENT, REGISTRY, SCHEDULER, WORKER
from tests.cli.launches import MACHINE, configs, ids_of
from tests.cli.refused import refused

SERVING = {"gateways": 1, "tokenizers": 1, "detokenizers": 1}
ACTORS = {
    "head": ids_of(host="head"),
    "p": ids_of("prefill-0", host="p", serves=False),
    "d-1": ids_of("decode-0", "decode-1", host="d-1", serves=False),
}
"""Of `three`, by host."""


def three(**options):
    hosts = {
        "head": HostSettings(address="head", **SERVING),
        "p": HostSettings(address="10.0.0.2", prefill=1),
        "d-1": HostSettings(address="fd00::3", bind="::", decode=2),
    }
    return Settings(hosts=hosts, insecure=True, **{"model": "echo", **options})


def planned(mesh, host, machine=MACHINE):
    own = msgspec.structs.replace(mesh, on=host)
    return plan_topology(own, resolve_model(mesh.model), mesh.model, machine)


def ids(topology):
    return [launch.actor_id for launch in topology.actors]


@pytest.mark.parametrize("host", ACTORS)
def test_ports_that_are_too_few_are_refused_before_anything_starts(host):
    """Two for each actor and for the supervisor; the registry of `head` has two of its own."""
    needed = 2 * len({*ACTORS[host]} - {"registry"}) + 2

    def with_ports(number):
        mesh = three()
        own = msgspec.structs.replace(mesh.hosts[host], ports=f"7500-{7500 + number - 1}")
        return planned(msgspec.structs.replace(mesh, hosts={**mesh.hosts, host: own}), host)

    assert with_ports(needed).settings.on == host
    what = f"ports 7500-{7500 + needed - 2} are too few for host {host}"
    with refused(BadConfig, what, why=f"listens on {needed},", do=f"7500-{7500 + 2 * needed - 1} "):
        with_ports(needed - 1)


def test_each_host_has_its_own_actors():
    head, p, d = (planned(three(), host) for host in ("head", "p", "d-1"))
    assert [ids(topology) for topology in (head, p, d)] == list(ACTORS.values())
    assert [topology.has_gateway for topology in (head, p, d)] == [True, False, False]
    assert [topology.settings.on for topology in (head, p, d)] == ["head", "p", "d-1"]
    # Gateways that listen on loopback are on their host's.
    assert [(topology.gateway_host, topology.url) for topology in (head, p)] == [
        ("", "http://127.0.0.1:8000"),
        ("head", "http://127.0.0.1:8000"),
    ]
    assert [planned(three(host="0.0.0.0"), host).url for host in ("head", "p")] == [
        "http://127.0.0.1:8000",
        "http://head:8000",
    ]
    assert configs(head, REGISTRY)[0].port == 7400
    assert head.pool_bytes == 0 < d.pool_bytes
    assert not any(topology.notes for topology in (head, p, d)), "the mesh has groups of both kinds"
    # Who stands in for whom does not depend on where they are.
    kinds = {launch.kind for launch in d.actors if launch.role in (WORKER, SCHEDULER)}
    assert kinds == {"decode worker 0", "decode scheduler"}


def test_pages_go_between_hosts_by_tcp():
    [agent] = configs(planned(three(), "d-1"), KV_AGENT)
    assert (agent.host_transport, agent.tcp.host, agent.tcp.bind) == ("tcp", "fd00::3", "::")
    assert agent.tcp.trusted_network
    assert [pool.group for pool in agent.pools] == ["decode-0.d-1", "decode-1.d-1"]
    [agent] = configs(planned(three(roles={"kv_agent": {"tcp": {"num_streams": 2}}}), "p"), KV_AGENT)
    assert (agent.tcp.num_streams, agent.tcp.host, agent.tcp.trusted_network) == (2, "10.0.0.2", True)
    alone = Settings(model="echo", hosts={"a": HostSettings(address="a", mixed=1, **SERVING)}, on="a", insecure=True)
    [agent] = configs(planned(alone, "a"), KV_AGENT)
    assert agent.host_transport == "shm"


def test_ranks_of_a_group_are_of_its_host():
    topology = planned(three(model="random:tiny-qwen3", decode_tp=2), "d-1")
    workers = configs(topology, WORKER)
    assert workers[1].workers == ("worker-decode-0.d-1", "worker-decode-0.d-1.1")
    assert {launch.actor_id for launch in topology.actors if host_of(launch.actor_id) != "d-1"} == set()
    assert [host_of(i) for i in ids(plan_of_one(tp=2)) if i.endswith(".1")] == ["", ""]


def plan_of_one(**options):
    return planned(Settings(model="random:tiny-qwen3", **options), "")


def test_notes_are_of_the_whole_mesh():
    hosts = {"a": HostSettings(address="a", **SERVING), "b": HostSettings(address="b", prefill=1)}
    mesh = msgspec.structs.replace(three(), hosts=hosts)
    notes = ["there is no decode group: prefill groups decode, too"]
    assert planned(mesh, "a").notes == planned(mesh, "b").notes == notes


def test_one_address_of_two_hosts_is_noted():
    hosts = {name: HostSettings(address="10.0.0.2", bind="10.0.0.2", mixed=1, **SERVING) for name in ("a", "b")}
    mesh = msgspec.structs.replace(three(), hosts=hosts)
    notes = ["hosts a, b have the address 10.0.0.2, which is only right on one machine"]
    assert planned(mesh, "a").notes == planned(mesh, "b").notes == notes


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 40960),
        ({"context_length": 3000}, 3000),
        ({"kv": KVSettings(pages=200)}, 3184),
        ({"kv": KVSettings(memory="300MiB")}, 2720),
        ({"kv": KVSettings(memory="300MiB"), "decode_tp": 2, "prefill_tp": 2}, 5456),
    ],
)
def test_all_hosts_serve_one_context(options, length):
    mesh = three(model="random:qwen3-0.6b", **options)
    machines = {"head": Machine(2, 64 << 20, 0), "p": MACHINE, "d-1": Machine(2, 64 << 30, 0)}
    assert {planned(mesh, host, machine).context.length for host, machine in machines.items()} == {length}


def test_a_host_whose_memory_holds_less_than_the_others_is_refused():
    small = Machine(2, 512 << 20, 0)
    with refused(NoMemory, do="--context-length 3728"):
        planned(three(model="random:qwen3-0.6b"), "p", small)
    assert planned(three(model="random:qwen3-0.6b", context_length=3728), "p", small).context.length == 3728


NAMES = st.from_regex(HOST_NAME.replace("$", r"\Z"))
COUNTS = st.sampled_from([0, 0, 1, 2])
HOSTS = st.builds(
    HostSettings,
    address=st.just("10.0.0.1"), registry=st.booleans(), gateways=COUNTS, tokenizers=COUNTS, detokenizers=COUNTS,
    prefill=COUNTS, decode=COUNTS, mixed=COUNTS,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, HOSTS, min_size=1, max_size=5), st.integers(1, 2))
def test_any_table_of_hosts_makes_one_mesh(hosts, tp):
    mesh = Settings(model="echo", hosts=hosts, insecure=True, tp=tp)
    try:
        check_hosts(hosts, next(iter(hosts)), ())
    except BadConfig:
        return
    topologies = {host: planned(mesh, host) for host in hosts}
    everybody = [actor_id for topology in topologies.values() for actor_id in ids(topology)]
    assert len(set(everybody)) == len(everybody)
    assert everybody.count("registry") == 1
    for host, topology in topologies.items():
        here = set(ids(topology))
        assert {host_of(actor_id) for actor_id in here - {"registry"}} <= {host}
        workers, schedulers = configs(topology, WORKER), configs(topology, SCHEDULER)
        for one in [*workers, *schedulers]:
            assert {one.agent, *one.workers} <= here
        assert {one.worker for one in schedulers} <= here
        groups = {one.group for one in schedulers}
        assert groups == {one.group for one in workers}
        assert groups == {pool.group for agent in configs(topology, KV_AGENT) for pool in agent.pools}
        assert all(host_of(group) == host for group in groups)
        assert ("registry" in here) == (host == mesh.registry_host)
        assert topology.has_gateway == bool(hosts[host].gateways)


def test_what_is_shown_is_the_file_of_all_hosts(tmp_path, capsys):
    file = tmp_path / "mesh.toml"
    served = "gateways = 1\ntokenizers = 1\ndetokenizers = 1\n"
    hosts = f'[hosts.a]\naddress = "a"\nmixed = 1\n{served}[hosts.b]\naddress = "b"\ndecode = 1\n'
    file.write_text(f'model = "echo"\ninsecure = true\n{hosts}')
    show(file, "toml", "b")
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_settings(shown, {}, {"host": "b"}).hosts == load_settings(file, {}, {"host": "b"}).hosts


def test_the_schema_has_hosts_and_not_what_is_filled_in():
    definitions = topology_schema()["$defs"]
    properties = definitions["Settings"]["properties"]
    assert "on" not in properties
    assert properties["hosts"]["propertyNames"]["pattern"] == HOST_NAME
    assert properties["hosts"]["additionalProperties"] == {"$ref": "#/$defs/HostSettings"}
    assert definitions["HostSettings"]["required"] == ["address"]
    json.dumps(definitions)
