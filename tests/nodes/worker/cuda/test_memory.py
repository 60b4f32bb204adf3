"""What fits and what does not, in numbers."""

import pytest

from nodes.model_spec import resolve_model
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.load import build_runner
from nodes.worker.cuda.memory import largest_step
from nodes.worker.errors import DeviceMemoryShort
from nodes.worker.ops.torch.batch import host_batch
from nodes.worker.pool.device_memory import Footprint, activation_bytes, check_fit, weight_bytes
from tests.nodes.worker.cuda.device_running import host_pool
from tests.nodes.worker.cuda.rank_running import in_ranks, rank_runner

GIB = 1 << 30


def test_the_bound_counts_the_widest_moment() -> None:
    spec = resolve_model("random:qwen3-0.6b")
    # 8192 rows: residual, norm, gate and up, their product, in bfloat16.
    assert activation_bytes(spec, "bfloat16", 8192, 1) == 8192 * (2 * 1024 + 3 * 3072) * 2
    # 256 rows that all draw: logits and four float32 copies outweigh the layers.
    assert activation_bytes(spec, "bfloat16", 256, 256) == 256 * (2 * 2 * 1024 + 151_936 * 18)
    assert activation_bytes(spec, "bfloat16", 128, 256) == activation_bytes(spec, "bfloat16", 256, 256) // 2
    assert activation_bytes(spec, "float32", 8192, 1) == 2 * activation_bytes(spec, "bfloat16", 8192, 1)


def test_weights_are_counted_as_the_network_holds_them() -> None:
    for model in ("random:tiny-qwen2", "random:tiny-llama", "random:tiny-qwen3"):
        spec, view = resolve_model(model), host_pool(model, "bfloat16", 4)
        config = WorkerConfig(group="g", model=model, agent="a", dtype="bfloat16")
        network = build_runner(spec, config, view)[1]
        # Other kernels than torch's take norms in the model's dtype.
        more = sum(norm.nbytes // 2 for norm in network._norms.values())
        assert weight_bytes(spec, "bfloat16") == network.weight_bytes - more
    assert weight_bytes(resolve_model("random:qwen3-8b"), "bfloat16") / 1e9 == pytest.approx(16.4, abs=0.05)
    assert weight_bytes(resolve_model("random:qwen3-0.6b"), "bfloat16") / 1e9 == pytest.approx(1.21, abs=0.01)


def test_a_rank_has_its_share_of_weights_and_activations() -> None:
    spec = resolve_model("random:qwen3-8b")
    whole, half = weight_bytes(spec, "bfloat16"), weight_bytes(spec, "bfloat16", 2)
    table = spec.context_length * spec.head_dim * 4
    norms = 2 * (spec.num_layers * (2 * spec.hidden_size + 2 * spec.head_dim) + spec.hidden_size)
    assert 2 * half == whole + table + norms
    # 8192 rows: residual and norm whole, a quarter of gate and up and their product; 512 rows of all ranks, twice.
    layers = 8192 * (2 * 4096 + 3 * 12_288 // 4) * 2
    assert activation_bytes(spec, "bfloat16", 8192, 1, 4) == layers + 512 * 2 * 4 * 4096 * 2
    # Every rank draws from the whole vocabulary.
    assert activation_bytes(spec, "bfloat16", 256, 256, 8) == activation_bytes(spec, "bfloat16", 256, 256)


def test_a_rank_weighs_what_is_counted() -> None:
    # A vocabulary that is padded, and a KV head that is held twice.
    found = in_ranks(4, lambda group: rank_runner("random:tiny-qwen3", group)._network.weight_bytes)
    assert found == [weight_bytes(resolve_model("random:tiny-qwen3"), "float32", 4)] * 4


def test_a_pool_may_take_what_is_left() -> None:
    footprint = Footprint(total=80 * GIB, fraction=0.9, weights=15 * GIB, activations=1 * GIB)
    assert footprint.left_for_pool == 56 * GIB
    check_fit(footprint, 56 * GIB)
    with pytest.raises(DeviceMemoryShort) as caught:
        check_fit(footprint, 56 * GIB + 1)
    for number in ("15.00 GiB", "1.00 GiB", "56.00 GiB", "90%", "80.00 GiB", "72.00 GiB"):
        assert number in str(caught.value)


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 1), (2, 2), (50, 50), (100_000, 8192)])
def test_the_largest_step_has_all_rows_and_touches_the_padding_page_only(num_rows: int, expected: int) -> None:
    batch = host_batch(largest_step(num_rows, 16, 8192), 16)
    assert batch.num_rows == expected
    assert batch.num_decodes == (2 if num_rows == 2 else 1)
    assert set(batch.write_pages.tolist()) | set(batch.table.indices.tolist()) == {0}
    assert batch.positions.max() < 8192
