"""Meshes on a CUDA device: who is spawned, who is told the device, and how its memory is shared out."""

import sys
import time
import types

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.errors import BadConfig, NoMemory
from cli.exit_codes import ExitCode
from cli.plan.devices import (
    AGENT_OVERHEAD_BYTES,
    GROUP_OVERHEAD_BYTES,
    WORKER_OVERHEAD_BYTES,
    DeviceLoad,
    DeviceMemory,
    device_pages,
)
from cli.plan.settings import KVSettings, Settings, SupervisionSettings
from cli.plan.topology import Machine, plan_topology
from cli.supervisor import device_memory
from cli.supervisor.device_memory import ask_device, ask_devices, device_id
from cli.supervisor.forks.role import known_failure
from kvstore.errors import (
    DeviceExhaustedMemory,
    DeviceFault,
    DeviceHandleInvalid,
    DeviceUnavailable,
    TransferError,
    TransportUnusable,
)
from nodes.model_spec import resolve_model
from nodes.worker.errors import BackendMissing, DeviceMemoryShort, GroupNotFormed
from tests.cli.launches import configs
from tests.cli.refused import refused

GIB = 1 << 30
H100 = DeviceMemory("cuda:0", 80 * GIB, 79 * GIB)


def planned(model="random:qwen3-0.6b", *memory, device="cuda", **options):
    machine = Machine(8, 8 << 30, 1000, () if device == "cpu" else memory or (H100,))
    return plan_topology(Settings(model=model, device=device, **options), resolve_model(model), model, machine)


def test_who_uses_cuda_is_spawned_and_the_warm_process_has_no_torch():
    topology = planned()
    starts = {launch.actor_id: launch.start for launch in topology.actors}
    assert {name for name, start in starts.items() if start == "plain"} == {
        "kv-agent-0", "worker-prefill-0", "worker-decode-0",
    }  # fmt: skip
    assert topology.forks
    assert not [name for name in topology.preloads if "worker" in name or "kv_agent" in name]
    assert "nodes.worker.ops.torch.load" in planned(device="cpu").preloads
    timeouts = {launch.role: launch.start_timeout_s for launch in topology.actors}
    assert timeouts["worker"] > 600 > timeouts["gateway"]
    assert {launch.start_timeout_s for launch in planned(device="cpu").actors} == {120.0}
    patient = planned(supervision=SupervisionSettings(start_timeout_s=5000.0))
    assert {launch.start_timeout_s for launch in patient.actors} == {5000.0}


def test_the_agent_frees_the_device_after_the_workers_have_let_go_of_it():
    tiers = {launch.role: launch.drain_tier for launch in planned().actors}
    assert tiers["gateway"] < tiers["scheduler"] < tiers["worker"] < tiers["kv_agent"] < tiers["registry"]


@pytest.mark.parametrize(("device", "name"), [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:3", "cuda:3")])
def test_pool_and_worker_are_told_the_same_device(device, name):
    memory = DeviceMemory(name, 80 * GIB, 79 * GIB)
    topology = planned(
        "random:qwen3-0.6b", memory, device=device, mem_fraction=0.8, deterministic=True, memory_saver=True
    )
    (agent,) = configs(topology, "kv_agent")
    assert {pool.device for pool in agent.pools} == {name}
    for worker in configs(topology, "worker"):
        assert (worker.device, worker.mem_fraction, worker.deterministic) == (name, 0.8, True)
        assert worker.memory_saver


def test_settings_of_workers_that_have_no_flag():
    topology = planned(roles={"worker": {"attention": "torch", "cuda_graphs": False}})
    assert {(worker.attention, worker.cuda_graphs) for worker in configs(topology, "worker")} == {("torch", False)}


def test_chunks_are_larger_on_a_device():
    assert {one.chunk_tokens for one in configs(planned(), "scheduler")} == {2048}
    assert {one.chunk_tokens for one in configs(planned(device="cpu"), "scheduler")} == {256}
    assert {one.chunk_tokens for one in configs(planned(chunk=512), "scheduler")} == {512}
    for worker, scheduler in zip(configs(planned(), "worker"), configs(planned(), "scheduler"), strict=True):
        assert worker.max_batch_tokens >= scheduler.step_tokens >= 2048 + 256


def test_an_encoder_gets_its_whole_input_at_once():
    def sizes(**options):
        topology = planned("random:tiny-bert", device="cpu", **options)
        [scheduler] = {(one.chunk_tokens, one.step_tokens) for one in configs(topology, "scheduler")}
        assert all(one.max_batch_tokens >= scheduler[1] for one in configs(topology, "worker"))
        return scheduler

    assert sizes() == (512, 768)
    assert sizes(context_length=300) == (304, 560), "whole pages"
    assert sizes(chunk=1024) == (1024, 1280)
    assert sizes(kv=KVSettings(page_size=8), context_length=10) == (256, 512)


@given(
    st.sampled_from(["random:qwen3-0.6b", "random:qwen3-8b", "random:llama-3.2-1b"]),
    st.integers(1, 200), st.integers(0, 40), st.integers(1, 4), st.sampled_from([0.3, 0.9, 0.98]),
)  # fmt: skip
def test_groups_share_the_device_and_fit(model, total_gib, used_gib, num_groups, fraction):
    memory = DeviceMemory("cuda:0", total_gib * GIB, max(0, total_gib - used_gib) * GIB)
    try:
        topology = planned(model, memory, mixed=num_groups, mem_fraction=fraction)
    except NoMemory:
        return
    (agent,) = configs(topology, "kv_agent")
    layout = agent.pools[0].layout
    load = DeviceLoad(resolve_model(model), "bfloat16", configs(topology, "worker")[0].max_batch_tokens, num_groups, 0)
    taken = sum(pool.num_pages * layout.page_bytes + load.group_bytes for pool in agent.pools) + AGENT_OVERHEAD_BYTES
    assert len(agent.pools) == num_groups
    assert taken <= min(memory.free_bytes, memory.total_bytes * fraction)
    # Nothing is left lying either: one page more for each would not fit.
    assert taken + num_groups * (layout.page_bytes + 1) > min(memory.free_bytes, int(memory.total_bytes * fraction))


def test_an_8b_model_on_an_h100():
    (agent,) = configs(planned("random:qwen3-8b", mixed=1), "kv_agent")
    [pool] = agent.pools
    # 72 GiB, less 15.3 of weights, about a gigabyte of activations, 1.75 of contexts.
    assert 380_000 < pool.num_pages * 16 < 400_000
    with pytest.raises(NoMemory, match="does not fit into cuda:0") as caught:
        planned("random:qwen3-8b", DeviceMemory("cuda:0", 24 * GIB, 23 * GIB), prefill=1, decode=1)
    for part in ("2 groups", "15.28 GiB", "90% of 24.00 GiB", "21.60 GiB", "23.00 GiB that are free"):
        assert part in caught.value.why


def test_a_rank_leaves_more_room_than_a_worker_alone():
    spec = resolve_model("random:qwen3-8b")
    alone, rank = (DeviceLoad(spec, "bfloat16", 2304, 1, 0.9, size) for size in (1, 4))
    assert rank.weight_bytes < 0.26 * alone.weight_bytes
    assert rank.group_bytes == (
        rank.weight_bytes + rank.activation_bytes + WORKER_OVERHEAD_BYTES + GROUP_OVERHEAD_BYTES
    )
    layouts = spec.kv_layout(), spec.kv_layout(tp_rank=3, tp_size=4)
    pages = [device_pages(H100, load, layout, None, 1) for load, layout in zip((alone, rank), layouts, strict=True)]
    # A page is a quarter as large, and three quarters of the weights are elsewhere.
    assert 4.6 < pages[1] / pages[0] < 5.2


def test_pages_as_asked_for():
    pages = {pool.num_pages for pool in configs(planned(kv=KVSettings(pages=177)), "kv_agent")[0].pools}
    assert pages == {177}
    [agent] = configs(planned(kv=KVSettings(memory="1GiB")), "kv_agent")
    assert {pool.num_pages for pool in agent.pools} == {GIB // agent.pools[0].layout.page_bytes}
    with pytest.raises(NoMemory, match="does not fit"):
        planned(kv=KVSettings(memory="60GiB"))


def test_what_a_devices_memory_leaves_is_the_context():
    assert planned(mixed=1).context.length == 40_960
    small = DeviceMemory("cuda:0", 24 * GIB, 20 * GIB)
    topology = planned("random:qwen3-8b", small, mixed=1)
    assert topology.context.length == topology.context.kv_tokens < 40_960
    assert str(topology.context).endswith("of the model's 40,960: for more, use --mem-fraction or fewer groups")
    assert configs(topology, "gateway")[0].context_length == topology.context.length
    asked = planned("random:qwen3-8b", small, mixed=1, kv=KVSettings(memory="1GiB"))
    assert str(asked.context).endswith("for more, use --kv-memory")
    with refused(NoMemory, do=("--kv-pages 129", "--context-length 1584")):
        planned("random:qwen3-8b", small, mixed=1, kv=KVSettings(pages=100))
    # One page less than 2,048 tokens and the padding page take does not fit.
    barely = DeviceMemory("cuda:0", 24 * GIB, 18 * GIB - (1 << 25))
    with refused(NoMemory, "does not fit into cuda:0", why="a pool of 129 pages", do="--context-length"):
        planned("random:qwen3-8b", barely, mixed=1)
    assert planned("random:qwen3-8b", barely, mixed=1, context_length=256).context.length == 256


def test_shared_memory_holds_page_tables_only():
    topology = planned()
    assert 0 < topology.pool_bytes < 64 << 20


def test_what_cannot_be_on_a_device():
    with pytest.raises(BadConfig, match="echo cannot run on cuda"):
        planned("echo")
    with pytest.raises(BadConfig, match="no memory saver on the CPU"):
        planned(device="cpu", memory_saver=True)
    with pytest.raises(BadConfig, match="is for workers that compute alone"):
        planned("random:qwen3-8b", *two(), mixed=1, tp=2, memory_saver=True)
    for options in ({"model": "random:qwen3-0.6b"}, {"model": "random:tiny-qwen2", "device": "cpu", "tp": 2}):
        with pytest.raises(BadConfig, match=r"--quantize int8 cannot be used with --(device cuda|tp 2)"):
            planned(**options, quantize="int8")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"device": "gpu"}, Settings)


@pytest.mark.parametrize(
    ("visible", "ordinal", "expected"),
    [(None, 2, "2"), ("0,1", 1, "1"), ("3", 0, "3"), ("GPU-5f, GPU-77", 1, "GPU-77")],
)
def test_devices_are_numbered_as_cuda_does(visible, ordinal, expected):
    assert device_id(ordinal, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize(("visible", "ordinal"), [("", 0), ("0,1", 2)])
def test_devices_that_are_hidden(visible, ordinal):
    with pytest.raises(BadConfig, match=f"cuda:{ordinal} cannot be used"):
        device_id(ordinal, {"CUDA_VISIBLE_DEVICES": visible})


class Nvml:
    """What `ask_device` uses of the module `pynvml`, with two devices."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.is_open = False
        self.is_hung = False
        self.devices = {"0": (143771 << 20, 143160 << 20), "GPU-77": (81559 << 20, 80991 << 20)}

    def nvmlInit(self):
        if not self.devices:
            raise self.NVMLError("Driver Not Loaded")
        if self.is_hung:
            time.sleep(0.5)
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        assert self.is_open
        if index >= len(self.devices):
            raise self.NVMLError("Invalid Argument")
        return list(self.devices.values())[index]

    def nvmlDeviceGetHandleByUUID(self, name):
        assert self.is_open
        if name not in self.devices:
            raise self.NVMLError("Not Found")
        return self.devices[name]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=handle[0], free=handle[1])


def test_nvml_is_asked_and_let_go(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert ask_device(0, {}) == DeviceMemory("cuda:0", 143771 << 20, 143160 << 20)
    assert ask_device(0, {"CUDA_VISIBLE_DEVICES": "GPU-77"}) == DeviceMemory("cuda:0", 81559 << 20, 80991 << 20)
    assert [device.name for device in ask_devices("cuda", {})] == ["cuda:0", "cuda:1"]
    assert not nvml.is_open


def test_refusals_of_nvml_are_passed_on(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for visible in ("GPU-5f", "7"):
        with pytest.raises(BadConfig, match="cuda:0 cannot be used") as caught:
            ask_device(0, {"CUDA_VISIBLE_DEVICES": visible})
        assert caught.value.why.startswith("NVML says: ")
    assert not nvml.is_open
    nvml.is_hung = True
    monkeypatch.setattr(device_memory, "_TIMEOUT_S", 0.1)
    with refused(BadConfig, why="does not answer"):
        ask_device(0, {})
    nvml.devices.clear()
    with refused(BadConfig, why="Driver Not Loaded"):
        ask_devices("cuda", {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with refused(BadConfig, why="kvmesh[cuda13]", do="--device cpu"):
        ask_device(0, {})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceUnavailable("no CUDA"), ExitCode.BAD_CONFIG),
        (TransportUnusable("no transport rdma is installed"), ExitCode.BAD_CONFIG),
        (TransferError("tcp_unavailable", "nobody can listen at 203.0.113.1"), ExitCode.BAD_CONFIG),
        (BackendMissing("no FlashInfer"), ExitCode.BAD_CONFIG),
        (DeviceExhaustedMemory("cuda:0", 2, 1, 3), ExitCode.NO_MEMORY),
        (DeviceMemoryShort("too much"), ExitCode.NO_MEMORY),
        (DeviceFault("illegal address"), ExitCode.FAILED),
        (DeviceHandleInvalid("its maker is gone"), ExitCode.FAILED),
        (GroupNotFormed("rank 1 did not come"), ExitCode.FAILED),
    ],
)
def test_what_a_start_on_a_device_ends_with(error, code):
    assert known_failure(error).code == code


# several devices


def two(free_gib=79):
    return DeviceMemory("cuda:0", 80 * GIB, 79 * GIB), DeviceMemory("cuda:1", 80 * GIB, free_gib * GIB)


def test_groups_are_dealt_out_to_devices_in_order():
    topology = planned("random:qwen3-8b", *two())
    assert {one.group: one.device for one in configs(topology, "worker")} == {
        "prefill-0": "cuda:0", "decode-0": "cuda:1",
    }  # fmt: skip
    (agent,) = configs(topology, "kv_agent")
    assert {pool.group: pool.device for pool in agent.pools} == {"prefill-0": "cuda:0", "decode-0": "cuda:1"}
    alone = planned("random:qwen3-8b", prefill=1, decode=1)
    assert agent.pools[0].num_pages > configs(alone, "kv_agent")[0].pools[0].num_pages, "each has a device for itself"


def test_ranks_of_a_group_are_on_devices_of_their_own():
    topology = planned("random:qwen3-8b", *two(), mixed=2, tp=2)
    workers = configs(topology, "worker")
    assert [(one.group, one.tp_rank, one.device) for one in workers] == [
        ("mixed-0", 0, "cuda:0"), ("mixed-0", 1, "cuda:1"), ("mixed-1", 0, "cuda:0"), ("mixed-1", 1, "cuda:1"),
    ]  # fmt: skip
    (agent,) = configs(topology, "kv_agent")
    assert {(pool.layout.tp_rank, pool.layout.num_kv_heads, pool.device) for pool in agent.pools} == {
        (0, 4, "cuda:0"), (1, 4, "cuda:1"),
    }  # fmt: skip
    whole = configs(planned("random:qwen3-8b", mixed=1), "kv_agent")[0].pools[0].num_pages
    halved = configs(planned("random:qwen3-8b", *two(), mixed=1, tp=2), "kv_agent")[0].pools[0].num_pages
    assert halved > 2 * whole, "half the pages' bytes, and half the weights"


def test_the_fullest_device_says_how_many_pages():
    def pages(free_gib):
        return configs(planned("random:qwen3-8b", *two(free_gib), mixed=1, tp=2), "kv_agent")[0].pools[0].num_pages

    assert pages(40) < pages(79)
    with pytest.raises(NoMemory, match="does not fit into cuda:1"):
        pages(5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mixed": 1, "tp": 3}, "a group of 3 ranks cannot be put on cuda:0, cuda:1"),
        ({"prefill": 1, "decode": 1, "tp": 2, "prefill_tp": 1}, "groups of 1 and 2 ranks cannot exchange pages"),
    ],
)
def test_groups_that_devices_cannot_hold(options, match):
    with pytest.raises(BadConfig, match=match):
        planned("random:qwen3-8b", *two(), **options)


def test_devices_as_named_and_as_visible(monkeypatch):
    nvml = Nvml()
    nvml.devices = {str(number): (100 << 20, 90 << 20) for number in range(4)}
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert ask_devices("cpu", {}) == ()
    assert [one.name for one in ask_devices("cuda", {})] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [one.name for one in ask_devices("cuda", {"CUDA_VISIBLE_DEVICES": "3,1"})] == ["cuda:0", "cuda:1"]
    assert [one.name for one in ask_devices("cuda:2,cuda:0", {})] == ["cuda:2", "cuda:0"]
    with refused(BadConfig, "cannot be used", why="twice"):
        ask_devices("cuda:1,cuda:1", {})
    with refused(BadConfig, why="no device is visible"):
        ask_devices("cuda", {"CUDA_VISIBLE_DEVICES": ""})
    for wrong in ("cuda:0,", "cuda,cuda:1", "cpu,cuda:0", "cuda:0;cuda:1"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"device": wrong}, Settings)
