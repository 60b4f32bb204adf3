import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.errors import BadConfig, NoMemory
from cli.plan.role_configs import check_config
from cli.plan.settings import KVSettings, Settings, SupervisionSettings
from cli.plan.sources import load_settings
from cli.plan.topology import Machine, plan_topology, segment_prefix
from kvstore.pool.page_pool import PoolInfo
from nodes.context_length import ServedContext
from nodes.model_spec import resolve_model
from nodes.request import SamplingDefaults
from tests.cli.launches import MACHINE, configs, ids_of
from tests.cli.refused import refused


def planned(model="echo", machine=MACHINE, **options):
    return plan_topology(Settings(model=model, **options), resolve_model(model), model, machine)


def test_the_default_mesh():
    topology = planned()
    assert [launch.actor_id for launch in topology.actors] == ids_of("prefill-0", "decode-0")
    assert {launch.start for launch in topology.actors} == {"fork"}
    assert "nodes.worker.actor" in topology.preloads
    # Where there is no torch none is imported.
    assert "nodes.worker.ops.torch.load" not in topology.preloads
    assert topology.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(("role", "field", "setting"), [("gateway", "port", "port"), ("worker", "group", "prefill")])
def test_what_several_actors_go_by_is_not_set_for_one_role(role, field, setting):
    with refused(BadConfig, rf"{field} cannot be set in \[roles\.{role}\]", do=setting):
        planned(roles={role: {field: 8009}})
    assert planned(roles={"kv_agent": {"tcp": {"port": 8009}}}), "the same word, and nobody else's business"


def test_rounded_weights_are_told_to_workers_and_gateways():
    topology = planned("random:tiny-qwen2", quantize="int8")
    assert {one.quantize for one in configs(topology, "worker")} == {"int8"}
    assert [one.quantization for one in configs(topology, "gateway")] == ["int8"]
    assert {one.quantize for one in configs(planned("random:tiny-qwen2"), "worker")} == {"none"}
    with pytest.raises(BadConfig, match="echo cannot be quantised"):
        planned(quantize="int8")
    with pytest.raises(BadConfig, match=r"quantize cannot be set in \[roles.worker\]"):
        planned("random:tiny-qwen2", roles={"worker": {"quantize": "int8"}})


def test_only_a_context_that_is_asked_for_is_told_to_workers():
    # What memory leaves room for must not change what is computed.
    assert {one.context_length for one in configs(planned("random:tiny-qwen2"), "worker")} == {0}
    asked = planned("random:tiny-qwen2", context_length=64)
    assert {one.context_length for one in configs(asked, "worker")} == {64}


def test_torch_workers_fork_and_share_the_cores():
    topology = planned("random:tiny-qwen2", prefill=1, decode=2)
    assert "nodes.worker.ops.torch.load" in topology.preloads
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
    assert [one for one in ids if "tokenizer" in one] == [
        "tokenizer-0", "tokenizer-1", "detokenizer-0", "detokenizer-1", "detokenizer-2",
    ]  # fmt: skip


def test_gateways_share_the_port():
    gateways = configs(planned(gateways=3), "gateway")
    assert [(one.port, one.reuse_port) for one in gateways] == [(8000, True)] * 3
    assert not configs(planned(), "gateway")[0].reuse_port


def test_gateways_know_what_reads_answers():
    (gateway,) = configs(planned(tool_call_parser="mistral", reasoning_parser="none"), "gateway")
    assert (gateway.tool_call_parser, gateway.reasoning_parser) == ("mistral", "none")
    with pytest.raises(BadConfig, match="no tool-call parser 'mistrall'; there are hermes, "):
        planned(tool_call_parser="mistrall")
    with pytest.raises(BadConfig, match="no reasoning parser 'hermes'"):
        check_config("gateway", {"model_name": "m", "context_length": 8, "reasoning_parser": "hermes"})


def test_gateways_know_the_pages_that_may_ask():
    (gateway,) = configs(planned(cors_origins=["https://chat.example"]), "gateway")
    assert gateway.cors_origins == ("https://chat.example",)


def test_gateways_of_a_mesh_know_the_proxies_and_hash_addresses_alike():
    settings = {"trusted_proxies": ["10.0.0.0/8"], "name": "shop", "gateways": 2}
    gateways = configs(planned(**settings), "gateway")
    assert {(one.trusted_proxies, one.client_salt) for one in gateways} == {(("10.0.0.0/8",), "shop")}
    salted = planned(**settings, roles={"gateway": {"client_salt": "nobody knows"}})
    assert {one.client_salt for one in configs(salted, "gateway")} == {"nobody knows"}


def test_gateways_know_whose_logprobs_to_answer():
    (gateway,) = configs(planned(logprobs_of="processed"), "gateway")
    assert gateway.logprobs_of == "processed"
    assert configs(planned(), "gateway")[0].logprobs_of == "raw"
    with pytest.raises(BadConfig, match="logprobs_of"):
        planned(roles={"gateway": {"logprobs_of": "processed"}})


def test_gateways_of_a_host_keep_responses_in_one_file():
    gateways = configs(planned(gateways=2, responses_store="2MiB"), "gateway")
    assert {(one.responses_file.rsplit("/", 1)[-1], one.responses_store_bytes) for one in gateways} == {
        ("responses.sqlite", 2 << 20)
    }
    assert configs(planned(), "gateway")[0].responses_store_bytes == 0
    with pytest.raises(BadConfig, match="--responses-store"):
        load_settings(None, {}, {"responses_store": "much"})


def test_gateways_have_a_page_unless_it_is_switched_off():
    assert configs(planned(), "gateway")[0].page
    assert not configs(planned(page=False), "gateway")[0].page


def test_only_what_differs_from_the_defaults_is_written():
    gateway = next(launch for launch in planned().actors if launch.role == "gateway")
    written = {"model_name", "model", "context_length", "context", "vocab_size", "request_log_folder", "client_salt"}
    assert set(gateway.config) == written


def test_overrides_of_a_role():
    topology = planned(roles={"gateway": {"max_inflight": 9}, "scheduler": {"policy": "longest_prefix"}})
    assert configs(topology, "gateway")[0].max_inflight == 9
    assert {config.policy for config in configs(topology, "scheduler")} == {"longest_prefix"}
    chosen = {"host_transport": "tcp", "tcp": {"num_streams": 2}}
    (agent,) = configs(planned(roles={"kv_agent": chosen}), "kv_agent")
    assert (agent.host_transport, agent.tcp.num_streams, agent.tcp.host) == ("tcp", 2, "127.0.0.1")
    (from_environment,) = configs(planned(roles={"gateway": {"max_inflight": "9"}}), "gateway")
    assert from_environment.max_inflight == 9
    with pytest.raises(BadConfig, match="the configuration of a gateway cannot be used"):
        planned(roles={"gateway": {"max_inflight": "many"}})


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
    with refused(BadConfig, words):
        planned(**options)


def test_pages_as_given_or_as_fit():
    assert configs(planned(kv=KVSettings(pages=177)), "kv_agent")[0].pools[0].num_pages == 177
    topology = planned("random:qwen2.5-0.5b", kv=KVSettings(memory="64MiB"))
    for pool in configs(topology, "kv_agent")[0].pools:
        taken = PoolInfo(group=pool.group, num_pages=pool.num_pages, layout=pool.layout, incarnation=0).file_bytes
        assert 63 << 20 < taken <= (64 << 20) + 4096
    assert topology.pool_bytes < (128 << 20) + 8192


def test_the_context_that_is_served_is_what_the_pools_hold():
    topology = planned("random:qwen3-0.6b", mixed=1)
    words = "KV: 4,656 tokens; context 4,656 of the model's 40,960: for more, use --kv-memory or a larger /dev/shm"
    assert str(topology.context) == words
    assert {one.context_length for one in configs(topology, "scheduler")} == {4656}
    assert configs(topology, "tokenizer")[0].context_length == 4656
    [gateway] = configs(topology, "gateway")
    assert (gateway.context_length, gateway.context) == (4656, topology.context)
    more = planned("random:qwen3-0.6b", mixed=1, kv=KVSettings(memory="2GiB")).context
    assert 18_000 < more.length < 19_000
    assert planned("tiny").context == ServedContext(length=2048, model_length=2048, kv_tokens=16384)


def test_a_context_that_is_asked_for_is_served_or_refused():
    asked = planned("random:qwen3-0.6b", mixed=1, context_length=8192).context
    # More than what pools are given unasked, and no more than that.
    assert (asked.length, asked.kv_tokens, asked.more_by) == (8192, 8192, "")
    asked = "a context of 8,192 was asked for, and takes 897.9 MiB"
    with refused(NoMemory, "too small", why=asked, do="--context-length 3728"):
        planned("random:qwen3-0.6b", Machine(2, 512 << 20, 0), mixed=1, context_length=8192)
    planned("random:qwen3-0.6b", Machine(2, 512 << 20, 0), mixed=1, context_length=3728)


def test_a_containers_shared_memory_is_too_little_for_a_model_unless_less_is_asked_for():
    container = Machine(2, 64 << 20, 0)
    room = ("64.0 MiB are free there", "the 51.2 MiB that a pool may take hold 448 tokens of random:qwen3-0.6b")
    ways = ("--shm-size=283m", "[kv] directory", "--context-length 448")
    with refused(NoMemory, "/dev/shm is too small for KV pools", why=room, do=ways):
        planned("random:qwen3-0.6b", container, mixed=1)
    planned("random:qwen3-0.6b", Machine(2, 283 << 20, 0), mixed=1)
    for length in (448, 100):
        assert planned("random:qwen3-0.6b", container, mixed=1, context_length=length).context.length == length
    # A model that was made for less than the least is served whole.
    assert planned("tiny", container).context.length == 2048


@pytest.mark.parametrize(
    ("kv", "do"),
    [
        (KVSettings(pages=77), "give them --kv-pages 129, or ask for less: --context-length 1216"),
        (KVSettings(memory="64MiB"), "give them --kv-memory 226MiB, or ask for less: --context-length 560"),
    ],
)
def test_pools_that_are_given_too_little_say_how_much_is_enough(kv, do):
    with pytest.raises(NoMemory, match="too small for the context") as caught:
        planned("random:qwen3-0.6b", mixed=1, kv=kv)
    assert caught.value.do == do
    length = int(do.rpartition(" ")[2])
    assert planned("random:qwen3-0.6b", mixed=1, kv=kv, context_length=length).context.length == length
    with pytest.raises(NoMemory):
        planned("random:qwen3-0.6b", mixed=1, kv=kv, context_length=length + 1)
    enough = KVSettings(pages=129) if kv.pages else KVSettings(memory="226MiB")
    assert planned("random:qwen3-0.6b", mixed=1, kv=enough).context.length >= 2048


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
    context = topology.context
    assert 2048 <= context.length <= min(context.kv_tokens, context.model_length)
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
    with pytest.raises(BadConfig, match="choose one of: gateway, tokenizer, "):
        check_config("poet", {})
    with pytest.raises(BadConfig, match="model_name, context_length is not given"):
        check_config("gateway", {})


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
    with refused(BadConfig, "--tp 3 cannot be used", why="Use a tensor-parallel size of 1, 2"):
        planned("random:qwen2.5-0.5b", mixed=1, tp=3)
    assert planned("echo", tp=3).actors, "echo computes nothing that could be cut"


def test_names_template_and_defaults_of_the_model_reach_those_who_need_them():
    spec = msgspec.structs.replace(resolve_model("echo"), sampling_defaults=SamplingDefaults(temperature=0.6))
    settings = Settings(model="org/name", served_name=["big", "gpt-4o"], chat_template="/t.jinja")
    topology = plan_topology(settings, spec, "/cache/snapshots/abc", MACHINE, "org/name@abc")
    (gateway,) = configs(topology, "gateway")
    assert (topology.model_name, gateway.served_names, gateway.model) == ("big", ("big", "gpt-4o"), "org/name@abc")
    assert gateway.sampling_defaults == SamplingDefaults(temperature=0.6)
    (tokenizer,) = configs(topology, "tokenizer")
    assert (tokenizer.model, tokenizer.chat_template) == ("/cache/snapshots/abc", "/t.jinja")
    off = msgspec.structs.replace(settings, roles={"gateway": {"sampling_defaults": {}}})
    (gateway,) = configs(plan_topology(off, spec, "x", MACHINE), "gateway")
    assert gateway.sampling_defaults == SamplingDefaults()
