import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.errors import BadConfig, NoMemory
from cli.settings import KVSettings, Settings, SupervisionSettings
from cli.topology import CONFIG_TYPES, Machine, check_config, plan_topology, segment_prefix
from kvstore.page_pool import PoolInfo
from nodes.model_spec import resolve_model

MACHINE = Machine(num_cores=4, pool_free_bytes=8 << 30, uid=1000)


def planned(model="echo", machine=MACHINE, **options):
    return plan_topology(Settings(model=model, **options), resolve_model(model), model, machine)


def configs(topology, role):
    return [check_config(role, launch.config) for launch in topology.actors if launch.role == role]


def test_the_default_mesh():
    topology = planned()
    assert [launch.actor_id for launch in topology.actors] == [
        "registry",
        "gateway-0",
        "kv-agent-0",
        "tokenizer-0",
        "detokenizer-0",
        "worker-prefill-0",
        "scheduler-prefill-0",
        "worker-decode-0",
        "scheduler-decode-0",
    ]
    assert {launch.start for launch in topology.actors} == {"fork"}
    assert "nodes.worker.actor" in topology.preloads
    # Where there is no torch none is imported.
    assert "nodes.worker.runner" not in topology.preloads
    assert topology.url == "http://127.0.0.1:8000"


def test_torch_workers_fork_and_share_the_cores():
    topology = planned("random:tiny-qwen2", prefill=1, decode=2)
    assert "nodes.worker.runner" in topology.preloads
    plain = planned("random:tiny-qwen2", supervision=SupervisionSettings(fork=False))
    assert {launch.start for launch in plain.actors} == {"plain"}
    assert not plain.forks
    assert not plain.preloads
    assert topology.num_threads == 1
    assert planned("random:tiny-qwen2").num_threads == 2
    assert planned("random:tiny-qwen2", threads=3).num_threads == 3
    assert [config.num_threads for config in configs(planned("random:tiny-qwen2"), "worker")] == [2, 2]


def test_every_configuration_fits_its_group():
    topology = planned("random:tiny-llama", mixed=1, prefill=1, decode=1, dtype="bfloat16", context_length=512)
    (agent,) = configs(topology, "kv_agent")
    pools = {pool.group: pool for pool in agent.pools}
    schedulers = configs(topology, "scheduler")
    workers = {config.group: config for config in configs(topology, "worker")}
    assert {s.group: s.phase for s in schedulers} == {"prefill-0": "prefill", "decode-0": "decode", "mixed-0": "mixed"}
    for scheduler in schedulers:
        worker = workers[scheduler.group]
        assert scheduler.worker == f"worker-{scheduler.group}"
        assert scheduler.agent == worker.agent == "kv-agent-0"
        assert scheduler.context_length == 512
        assert scheduler.step_tokens <= worker.max_batch_tokens
        assert pools[scheduler.group].layout == resolve_model("random:tiny-llama").kv_layout("bfloat16", 16)
    (gateway,) = configs(topology, "gateway")
    assert (gateway.context_length, gateway.model_name) == (512, "random:tiny-llama")


def test_several_of_the_stateless_roles():
    ids = [launch.actor_id for launch in planned(tokenizers=2, detokenizers=3).actors]
    assert [i for i in ids if "tokenizer" in i] == [
        "tokenizer-0",
        "tokenizer-1",
        "detokenizer-0",
        "detokenizer-1",
        "detokenizer-2",
    ]


def test_gateways_share_the_port():
    gateways = configs(planned(gateways=3), "gateway")
    assert [(one.port, one.reuse_port) for one in gateways] == [(8000, True)] * 3
    assert not configs(planned(), "gateway")[0].reuse_port


def test_only_what_differs_from_the_defaults_is_written():
    gateway = next(launch for launch in planned().actors if launch.role == "gateway")
    assert set(gateway.config) == {"model_name", "model", "context_length", "vocab_size"}


def test_overrides_of_a_role():
    topology = planned(roles={"gateway": {"max_inflight": 9}, "scheduler": {"policy": "longest_prefix"}})
    assert configs(topology, "gateway")[0].max_inflight == 9
    assert {config.policy for config in configs(topology, "scheduler")} == {"longest_prefix"}
    chosen = {"host_transport": "tcp", "tcp": {"num_streams": 2}}
    (agent,) = configs(planned(roles={"kv_agent": chosen}), "kv_agent")
    assert (agent.host_transport, agent.tcp.num_streams, agent.tcp.host) == ("tcp", 2, "127.0.0.1")
    (from_environment,) = configs(planned(roles={"gateway": {"max_inflight": "9"}}), "gateway")
    assert from_environment.max_inflight == 9
    with pytest.raises(BadConfig, match=r"roles\.gateway\.max_inflite"):
        planned(roles={"gateway": {"max_inflite": 9}})
    with pytest.raises(BadConfig, match="gateway"):
        planned(roles={"gateway": {"max_inflight": "many"}})
    with pytest.raises(BadConfig, match="no role 'gatevay'"):
        planned(roles={"gatevay": {}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill": 0, "decode": 0}, "no worker group"),
        ({"chunk": 100}, "chunk of 100"),
        ({"context_length": 1 << 20}, "context of 1048576"),
        ({"kv": KVSettings(memory="1")}, "too little"),
    ],
)
def test_what_cannot_be_planned(options, words):
    with pytest.raises(BadConfig, match=words) as caught:
        planned(**options)
    assert caught.value.do


def test_pages_as_given_or_as_fit():
    assert configs(planned(kv=KVSettings(pages=77)), "kv_agent")[0].pools[0].num_pages == 77
    topology = planned("random:qwen2.5-0.5b", kv=KVSettings(memory="64MiB"))
    for pool in configs(topology, "kv_agent")[0].pools:
        taken = PoolInfo(group=pool.group, num_pages=pool.num_pages, layout=pool.layout, incarnation=0).file_bytes
        assert 63 << 20 < taken <= (64 << 20) + 4096
    assert topology.pool_bytes < (128 << 20) + 8192


def test_pools_that_do_not_fit():
    small = Machine(2, 10 << 20, 0)
    with pytest.raises(NoMemory, match="do not fit"):
        planned("random:qwen2.5-0.5b", small, kv=KVSettings(pages=1000))
    with pytest.raises(NoMemory, match="too small"):
        planned("random:qwen3-0.6b", Machine(2, 4 << 20, 0))
    # A container's 64 MiB is enough for a small model.
    assert planned("random:tiny-qwen2", Machine(2, 64 << 20, 0)).pool_bytes < 64 << 20


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 64), st.integers(1 << 22, 1 << 36), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_default_pools_always_fit(num_cores, free_bytes, prefill, decode, mixed):
    machine = Machine(num_cores, free_bytes, 0)
    try:
        topology = planned("random:tiny-qwen2", machine, prefill=prefill, decode=decode, mixed=mixed)
    except (NoMemory, BadConfig):
        return
    assert topology.pool_bytes <= free_bytes
    assert 1 <= topology.num_threads <= num_cores
    assert len({launch.actor_id for launch in topology.actors}) == len(topology.actors)
    for launch in topology.actors:
        check_config(launch.role, launch.config)
        msgspec.json.encode(launch)


def test_prefixes_of_similar_names_do_not_overlap():
    assert not segment_prefix(0, "a-b").startswith(segment_prefix(0, "a"))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("node7", "http://node7:8000"),
    ],
)
def test_url_is_one_that_can_be_dialed(host, url):
    assert planned(host=host).url == url


def test_all_roles_have_a_type_and_an_unknown_one_is_refused():
    with pytest.raises(BadConfig, match="choose one of"):
        check_config("poet", {})
    assert len(CONFIG_TYPES) == 7


# tensor-parallel ranks


def test_a_group_has_a_worker_and_a_pool_for_each_rank():
    topology = planned("random:tiny-qwen3", tp=2, prefill_tp=1)
    assert [launch.actor_id for launch in topology.actors][5:] == [
        "worker-prefill-0", "scheduler-prefill-0", "worker-decode-0", "worker-decode-0.1", "scheduler-decode-0",
    ]  # fmt: skip
    ids = ("worker-decode-0", "worker-decode-0.1")
    prefill, zero, one = configs(topology, "worker")
    assert (prefill.tp_size, prefill.workers) == (1, ())
    assert [(worker.tp_rank, worker.tp_size, worker.workers) for worker in (zero, one)] == [(0, 2, ids), (1, 2, ids)]
    schedulers = {config.group: config for config in configs(topology, "scheduler")}
    assert schedulers["prefill-0"].ranks == ("worker-prefill-0",)
    assert schedulers["decode-0"].ranks == ids
    (agent,) = configs(topology, "kv_agent")
    assert {name: [pool.name for pool in pools] for name, pools in agent.groups.items()} == {
        "prefill-0": ["prefill-0"], "decode-0": ["decode-0", "decode-0.1"],
    }  # fmt: skip
    assert len({pool.num_pages for pool in agent.pools}) == 1
    assert len({pool.layout.digest for pool in agent.pools}) == 1, "they exchange pages"
    spec = resolve_model("random:tiny-qwen3")
    for worker in (prefill, zero, one):
        [pool] = [one for one in agent.groups[worker.group] if one.layout.tp_rank == worker.tp_rank]
        assert pool.layout == spec.kv_layout(worker.dtype, worker.page_size, worker.tp_rank, worker.tp_size)


def test_cores_are_shared_by_all_ranks():
    assert planned("random:tiny-qwen3").num_threads == 2
    assert planned("random:tiny-qwen3", tp=2).num_threads == 1


def test_ranks_of_all_groups_fit_into_memory_together():
    small = Machine(2, 32 << 20, 0)
    topology = planned("random:tiny-qwen3", small, tp=2)
    assert 0 < topology.pool_bytes < 32 << 20
    with pytest.raises(NoMemory, match="do not fit"):
        planned("random:tiny-qwen3", small, tp=2, kv=KVSettings(pages=100_000))


def test_a_size_that_a_model_cannot_be_cut_for():
    with pytest.raises(BadConfig, match="--tp 3 cannot be used") as caught:
        planned("random:qwen2.5-0.5b", mixed=1, tp=3)
    assert "Use a tensor-parallel size of 1, 2" in caught.value.why
    assert planned("echo", tp=3).actors, "echo computes nothing that could be cut"
