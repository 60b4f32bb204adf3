"""Folders drawn at random, as several releases of transformers write them: its logits, or a refusal that says why."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelError, resolve_model
from tests.nodes.worker.test_wrappers import VISION
from tests.nodes.worker.torch_running import logits_by_chunks, make_runner

logging.set_verbosity_error()
logging.disable_progress_bar()

IDS: Final = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1)).tolist()
CONTEXT: Final = 64
WRAPPED: Final = {"gemma3": "gemma3_text", "mistral3": "mistral"}
KINDS: Final = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "qwen3_moe", "gemma3_text", *WRAPPED)
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.08, "eos_token_id": 257,
}  # fmt: skip
LONGROPE: Final = {"short_factor": [1 + n / 16 for n in range(8)], "long_factor": [2 + n / 2 for n in range(8)]}

DIFFERENCES: Final = (
    "With longrope within a longer context, transformers takes the short factors for short calls and the long ones for"
    " others; here one choice serves all, since pages are shared and a sequence grows. Not drawn.",
    "With dynamic beyond config.json's context, each call of transformers has frequencies of its own; here, as in vLLM,"
    " they are those of the longest context. Not drawn; tests/nodes/worker/test_longer_contexts.py.",
    "With yarn and truncate in layers of one kind of Gemma 3, transformers looks for truncate where no file has it and"
    " always truncates; here it is read. Not drawn.",
)
"""What is computed otherwise on purpose."""

REFUSALS: Final = {
    r"no tensor '(language_model\.)?(model\.)?(lm_head|embed_tokens)\.weight'": "transformers draws weights for a head "
    "or embedding that is missing, and warns; whoever serves such a model serves noise",
}
"""What is refused on purpose though transformers loads it: words of the error, and the reason."""


class Folder(NamedTuple):
    kind: str
    config: dict[str, Any]
    tied: bool | None
    has_head: bool
    has_embedding: bool
    dtype: str
    claimed: list[str] | None
    """What `architectures` says if not the truth."""
    is_flat: bool
    """Whether its tensors have names without a prefix."""
    beside: str
    """What the shards are that an index beside the single file names, if there is one."""


@st.composite
def ropes(draw: st.DrawFn, *, is_gemma: bool) -> dict[str, Any]:
    """Fields of a config.json; in the older spelling the base is beside."""
    name = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope"]))
    factor = draw(st.sampled_from([1.0, 2, 4.0, 7.5]))
    original = draw(st.sampled_from([16, 32, CONTEXT]))
    rope: dict[str, Any] = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {"factor": draw(st.sampled_from([factor, None]))} | draw(yarn_options(is_gemma=is_gemma)),
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([2.0, 4.0]))},
        # Either all calls of this test are longer than the original context, or none is.
        "longrope": LONGROPE | draw(st.sampled_from([{}, {"factor": factor}, {"attention_factor": 1.5}])),
    }[name]
    others: dict[str, Any] = {}
    if name in ("yarn", "llama3", "longrope"):
        original = 16 if name == "longrope" else original
        key = {"original_max_position_embeddings": original}
        where = draw(st.sampled_from(["inside", "nowhere"] if is_gemma else ["inside", "beside", "both", "nowhere"]))
        rope |= key if where in ("inside", "both") else {}
        others |= {"original_max_position_embeddings": 24 if where == "both" else original} if "b" in where else {}
    base = {"rope_theta": draw(st.sampled_from([1e4, 5e5]))}
    if draw(st.booleans()):
        inner = {"rope_type": name} | base | rope
        sliding = {"rope_type": "default", "rope_theta": 1e3}
        nested = {"full_attention": inner, "sliding_attention": sliding} if is_gemma else inner
        return {"rope_parameters": nested} | others
    inner = {draw(st.sampled_from(["type", "rope_type"])): name} | rope
    return base | others | ({"rope_scaling": None if name == "default" else inner})


@st.composite
def yarn_options(draw: st.DrawFn, *, is_gemma: bool) -> dict[str, Any]:
    return draw(st.fixed_dictionaries({}, optional={
        "beta_fast": st.sampled_from([16, 0]), "beta_slow": st.just(2), "attention_factor": st.just(1.25),
        **({} if is_gemma else {"truncate": st.booleans()}),
        "mscale": st.just(0.8), "mscale_all_dim": st.just(0.5),
    }))  # fmt: skip


def own_fields(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of one architecture; any of them may be missing."""
    layers = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=3, max_size=3)
    window = st.sampled_from([9, 30, 4096])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "llama": {"attention_bias": st.booleans(), "mlp_bias": st.booleans()},
        "mistral": {"sliding_window": st.none() | window},
        "qwen2": {"use_sliding_window": st.booleans(), "max_window_layers": st.integers(0, 3)},
        "qwen3": {"attention_bias": st.booleans()},
        "olmo2": {"rms_norm_eps": st.just(1e-3)},
        "qwen3_moe": {
            "use_sliding_window": st.booleans(), "max_window_layers": st.integers(0, 3),
            "decoder_sparse_step": st.integers(1, 4), "norm_topk_prob": st.booleans(),
            "mlp_only_layers": st.none() | st.lists(st.integers(-1, 3), max_size=3),
        },
        "gemma3_text": {
            "hidden_act": st.just("gelu_pytorch_tanh"), "sliding_window": window, "layer_types": layers,
            "query_pre_attn_scalar": st.just(20),
            "sliding_window_pattern": st.integers(1, 4), "rope_local_base_freq": st.just(500.0),
        },
    }[kind]  # fmt: skip
    fixed: dict[str, Any] = {
        "qwen2": {"sliding_window": 9},
        "qwen3_moe": {"sliding_window": 9, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    }.get(kind, {})
    return st.fixed_dictionaries({}, optional=optional).map(lambda drawn: fixed | drawn)


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    kind = draw(st.sampled_from(KINDS))
    text = WRAPPED.get(kind, kind)
    heads = {} if text == "qwen2" else {"head_dim": 16}
    width = {"hidden_size": 64} if text == "qwen2" else {}
    rope = draw(ropes(is_gemma=text == "gemma3_text"))
    fields = {**SHAPE, **heads, **width, **rope, **draw(own_fields(text))}
    stored = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True), (False, False)]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    named = {draw(st.sampled_from(["dtype", "torch_dtype"])): dtype}
    tied = draw(st.sampled_from([True, True, False, None]))
    flag = {} if tied is None else {"tie_word_embeddings": tied}
    if kind in WRAPPED:
        ends = draw(st.sampled_from([{}, {"eos_token_id": [257, 3]}]))
        inner = draw(st.sampled_from([{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}]))
        config = {
            "text_config": fields | {"model_type": text} | inner,
            "vision_config": VISION,
            **ends,
            **flag,
            **named,
        }
    else:
        config = fields | flag | named
    return Folder(
        kind, config | {"model_type": kind}, tied, *stored, dtype,
        draw(st.sampled_from([None, None, ["LlamaForCausalLM"], ["MistralForCausalLM"], ["Qwen2ForCausalLM"]])),
        kind not in WRAPPED and draw(st.booleans()),
        draw(st.sampled_from(["", "", "gone", "others"])),
    )  # fmt: skip


def written(directory: Path, folder: Folder) -> torch.nn.Module:
    """Write it; returns the model that transformers reads from there, in float32."""
    auto = AutoModelForImageTextToText if folder.kind in WRAPPED else AutoModelForCausalLM
    (directory / "config.json").write_text(json.dumps(folder.config))
    torch.manual_seed(7)
    model: Any = auto.from_config(AutoConfig.from_pretrained(directory, tie_word_embeddings=False), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
        model.get_output_embeddings().weight.normal_(std=0.2)
        model.get_input_embeddings().weight.normal_(std=0.2)
    model.to(getattr(torch, folder.dtype)).save_pretrained(directory)
    left_out = (*([] if folder.has_head else ["lm_head."]), *([] if folder.has_embedding else ["embed_tokens."]))
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not any(out in name for out in left_out)}
    if folder.is_flat:
        kept = {name.removeprefix("model."): tensor for name, tensor in kept.items()}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    if folder.beside:
        weight_map = dict.fromkeys(kept, "w.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if folder.beside == "others":
        save_file({name: tensor + 1 for name, tensor in kept.items()}, directory / "w.safetensors", {"format": "pt"})
    architectures = folder.claimed or json.loads((directory / "config.json").read_text())["architectures"]
    (directory / "config.json").write_text(json.dumps(folder.config | {"architectures": architectures}))
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(300))
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def check(folder: Folder) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        reference = written(directory, folder)
        ties = folder.kind in (*WRAPPED, "gemma3_text") if folder.tied is None else folder.tied
        if not (folder.has_head or folder.has_embedding if ties else folder.has_head and folder.has_embedding):
            with pytest.raises(ModelError) as caught:
                resolve_model(name)
            assert any(re.search(words, caught.value.message) for words in REFUSALS)
            return
        assert resolve_model(name).dtype == folder.dtype
        with torch.no_grad():
            expected = reference(torch.tensor([IDS])).logits[0]
        assert expected.std() > 0.1, "logits all alike would agree with anything"
        runner = make_runner(directory, "float32", num_pages=12)
        found = logits_by_chunks(runner, IDS, [1, 2, 3, 4], [16, 1, 38, 5])
    assert torch.allclose(found, expected[[15, 16, 54, 59]], atol=1e-4, rtol=1e-4)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(folders())
def test_a_folder_is_read_as_transformers_reads_it(folder: Folder) -> None:
    check(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(folders())
def test_many_folders_are_read_as_transformers_reads_them(folder: Folder) -> None:
    check(folder)
