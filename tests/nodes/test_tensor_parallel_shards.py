"""Which rank holds what: every head, column and row once, KV heads as the transfer plan deals them out."""

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer.plan import held_heads
from nodes.model_spec import TensorParallelUnfit, resolve_model
from nodes.models.registry import parameters
from nodes.models.tensor_parallel import Part, fitting_tp_sizes, shard_of


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 8
    name: str = "shape"
    qk_norm: str = ""
    dense_size: int = 0
    is_encoder: bool = False


SHAPES = st.builds(
    lambda kv, group, inner, vocab: Shape(kv * group, kv, inner, vocab),
    st.integers(1, 16), st.integers(1, 8), st.integers(1, 200), st.integers(1, 1000),
)  # fmt: skip


@given(SHAPES, st.integers(1, 32))
def test_a_model_is_cut_whole_or_refused_with_the_sizes_that_fit(shape, size) -> None:
    fitting = fitting_tp_sizes(shape)
    if size not in fitting:
        with pytest.raises(TensorParallelUnfit) as caught:
            shard_of(shape, 0, size)
        assert caught.value.code == "tensor_parallel_unfit"
        assert str(caught.value).endswith(f"size of {', '.join(map(str, fitting))}.")
        assert shape.num_heads % size or shape.intermediate_size % size or "KV heads" in str(caught.value)
        return
    shards = [shard_of(shape, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads] == list(range(shape.num_heads))
    assert [column for shard in shards for column in shard.inner] == list(range(shape.intermediate_size))
    rows = [row for shard in shards for row in shard.vocab]
    assert rows == list(range(len(rows)))
    assert 0 <= len(rows) - shape.vocab_size < size
    group = shape.num_heads // shape.num_kv_heads
    for shard in shards:
        assert shard.kv_heads == held_heads(shard.rank, size, shape.num_kv_heads)
        # What a rank's queries attend over is there, and nothing else.
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert shard.num_heads % shard.num_kv_heads == 0


def test_parts_of_checkpoints() -> None:
    spec = resolve_model("random:qwen3-8b")
    table, shard = parameters(spec), spec.shard(3, 16)
    biased = parameters(msgspec.structs.replace(spec, qkv_bias=True, o_bias=True))
    layer = "model.layers.7."
    parts = {
        f"{layer}self_attn.q_proj.weight": Part(0, 6 * 128, 8 * 128),
        f"{layer}self_attn.k_proj.bias": Part(0, 128, 256),
        f"{layer}self_attn.o_proj.weight": Part(1, 6 * 128, 8 * 128),
        f"{layer}self_attn.o_proj.bias": None,
        f"{layer}mlp.up_proj.weight": Part(0, 3 * 768, 4 * 768),
        f"{layer}mlp.down_proj.weight": Part(1, 3 * 768, 4 * 768),
        "lm_head.weight": Part(0, 3 * 9496, 4 * 9496),
        "model.norm.weight": None,
        f"{layer}self_attn.q_norm.weight": None,
        f"{layer}input_layernorm.weight": None,
    }
    assert {name: shard.part_of(biased[name].cut) for name in parts} == parts
    assert spec.shard().part_of(table["lm_head.weight"].cut) is None


def test_what_fits_real_models() -> None:
    assert fitting_tp_sizes(resolve_model("random:qwen3-8b")) == [1, 2, 4, 8, 16, 32]
    assert fitting_tp_sizes(resolve_model("random:qwen2.5-0.5b")) == [1, 2]
    with pytest.raises(TensorParallelUnfit, match="14 attention heads cannot be divided evenly"):
        resolve_model("random:qwen2.5-0.5b").kv_layout(tp_rank=0, tp_size=4)
    with pytest.raises(TensorParallelUnfit, match="there is no rank 2 in a group of 2"):
        resolve_model("random:qwen3-8b").kv_layout(tp_rank=2, tp_size=2)
    with pytest.raises(TensorParallelUnfit, match="a group has 1 to 64 ranks"):
        resolve_model("random:qwen3-8b").shard(0, 0)


def test_layouts_of_ranks() -> None:
    spec = resolve_model("random:qwen3-8b")
    layouts = [spec.kv_layout(tp_rank=rank, tp_size=16) for rank in range(16)]
    assert ({layout.num_kv_heads for layout in layouts}, len(set(layouts))) == ({1}, 16)
    assert len({layout.digest for layout in layouts}) == 1, "pages of equal and unequal groups hold the same"
    assert spec.kv_layout(tp_rank=1, tp_size=2).token_bytes == spec.kv_layout().token_bytes // 2
    assert spec.kv_layout(tp_rank=0, tp_size=1) == spec.kv_layout()
    # The echo model keeps everything at every rank.
    assert resolve_model("echo").kv_layout(tp_rank=2, tp_size=3).num_kv_heads == 1
