"""Model directories as transformers 4 and 5 write them, presets, and every way in which a directory can be wrong."""

import json
import struct
from pathlib import Path

import msgspec
import pytest

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import (
    ModelDamaged,
    ModelError,
    ModelNotFound,
    ModelSpec,
    ModelUnsupported,
    RopeParameters,
    describe_model,
    known_models,
    resolve_model,
)
from nodes.model_spec.checkpoint_files import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, require_files
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.registry import ARCHITECTURES
from nodes.request import SamplingDefaults
from tests.nodes.checkpoints import LLAMA, SHAPE, fake_spec, write_model, write_safetensors

QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN3_MOE = SHAPE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
}  # fmt: skip
SLIDES = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
BOTH = ["sliding_attention", "full_attention"]


def test_llama_of_transformers_4(tmp_path: Path) -> None:
    config = LLAMA | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
    }  # fmt: skip
    directory = write_model(tmp_path / "my-llama", config)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "T4", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None})
    )
    spec = resolve_model(str(directory))
    assert (spec.name, spec.source, spec.architecture, spec.dtype) == ("my-llama", "directory", "llama", "bfloat16")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.context_length) == (4, 2, 4, 512)
    assert spec.rope == RopeParameters(
        rope_type="llama3", theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_context_length=256,
    )  # fmt: skip
    assert spec.eos_token_ids == (7, 2)
    assert (spec.chat_template, spec.special_tokens) == ("T4", {"bos_token": "<s>", "eos_token": "</s>"})
    assert not spec.qkv_bias
    assert not spec.qk_norm
    assert spec.weight_files == (str(directory / "model.safetensors"),)
    layout = spec.kv_layout(page_size=32)
    assert layout.page_shape == (2, 2, 32, 2, 4)
    assert (layout.dtype, layout.fingerprint) == ("bfloat16", spec.fingerprint)
    assert spec.kv_layout("float32").dtype == "float32"
    assert load_tokenizer(spec).decode([72, 105]) == "Hi"
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


def test_qwen3_of_transformers_5(tmp_path: Path) -> None:
    config = SHAPE | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "head_dim": 8,
        "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None, "hidden_act": "silu",
        "layer_types": ["full_attention"] * 2, "eos_token_id": [5, 6],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    }  # fmt: skip
    directory = write_model(tmp_path / "q3", config)
    (directory / "chat_template.jinja").write_text("T5 ü", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    spec = resolve_model(str(directory))
    assert spec.chat_template == "T5 ü"
    assert spec.rope == RopeParameters(rope_type="linear", theta=1e6, factor=4.0)
    assert spec.qk_norm
    assert (spec.head_dim, spec.eos_token_ids) == (8, (5, 6))
    assert "lm_head.weight" in expected_shapes(spec)
    assert expected_shapes(spec)["model.layers.1.self_attn.q_norm.weight"] == (8,)


def test_defaults_of_old_files(tmp_path: Path) -> None:
    config = SHAPE | {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2}}
    del config["num_key_value_heads"], config["max_position_embeddings"], config["rms_norm_eps"]
    config["tie_word_embeddings"] = False
    directory = write_model(tmp_path / "q2", config)
    spec = resolve_model(str(directory))
    assert (spec.num_kv_heads, spec.context_length, spec.rms_norm_eps) == (4, 2048, 1e-6)
    assert spec.qkv_bias
    assert not spec.o_bias
    assert not spec.mlp_bias
    assert spec.rope == RopeParameters(rope_type="linear", factor=2.0)
    assert (spec.chat_template, spec.eos_token_ids) == (None, ())
    assert spec.dtype == "float32"  # as stored


def test_float16_is_computed_in_float32_unless_the_device_says_otherwise(tmp_path: Path) -> None:
    spec = resolve_model(str(write_model(tmp_path / "half", LLAMA | {"torch_dtype": "float16"})))
    assert (spec.dtype, spec.compute_dtype(), spec.kv_layout().dtype) == ("float16", "float32", "float32")
    assert spec.compute_dtype("bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match="float16"):
        spec.compute_dtype("float16")


def test_gemma_has_its_activation_in_another_field(tmp_path: Path) -> None:
    gemma = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    plain = describe_model(str(write_model(tmp_path, gemma)))
    for key in ("hidden_activation", "hidden_act"):
        assert describe_model(str(write_model(tmp_path, gemma | {key: "gelu_pytorch_tanh"}))) == plain
    (tmp_path / "config.json").write_text(json.dumps(gemma | {"hidden_activation": "silu"}))
    with pytest.raises(ModelUnsupported, match="hidden_activation is 'silu'; supported is 'gelu_pytorch_tanh'"):
        describe_model(str(tmp_path))


@pytest.mark.parametrize(
    ("named", "dtype"), [("half", "float16"), ("float", "float32"), ("torch.bfloat16", "bfloat16")]
)
def test_other_names_of_a_dtype(tmp_path: Path, named: str, dtype: str) -> None:
    assert resolve_model(str(write_model(tmp_path, LLAMA | {"dtype": named}))).dtype == dtype


def test_the_type_decides_if_the_architectures_name_another(tmp_path: Path) -> None:
    """As in transformers, and it is said. Either alone is enough."""
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    for model_type, name, windows in (
        ("mistral", "LlamaForCausalLM", (4, 4)),
        ("llama", "MistralForCausalLM", (0, 0)),
        ("qwen2", "LlamaForCausalLM", (0, 4)),
    ):
        config = LLAMA | window | {"model_type": model_type, "architectures": [name]}
        spec = resolve_model(str(write_model(tmp_path / "m", config)))
        assert (spec.architecture, spec.layer_windows) == (model_type, windows)
        assert spec.notes == (
            f"m is served as {model_type}, its model_type, though its config.json names the architectures ['{name}']",
        )
        for other in ({"architectures": None}, {"architectures": ["Other", ARCHITECTURES[model_type].names[0]]}):
            (tmp_path / "m" / "config.json").write_text(json.dumps(config | other))
            plain = resolve_model(str(tmp_path / "m"))
            assert (plain.fingerprint, plain.notes) == (spec.fingerprint, ())
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | other | {"model_type": None}))
        assert resolve_model(str(tmp_path / "m")) == plain


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    assert resolve_model(str(directory)).sampling_defaults == SamplingDefaults()
    path = directory / "generation_config.json"
    said = {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "eos_token_id": [9, 8]}
    path.write_text(json.dumps(said | {"repetition_penalty": 1.05, "typical_p": 0.9}))
    spec = resolve_model(str(directory))
    meant = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05)
    assert spec.sampling_defaults == meant
    assert meant.describe() == "temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, repetition_penalty 1.05"
    assert spec.notes == ("m asks for typical_p 0.9, which is not supported and left out",)
    assert spec.eos_token_ids == (9, 8, 2), "config.json's own stay ends"
    plain = resolve_model(str(write_model(tmp_path / "n", LLAMA)))
    assert spec.fingerprint == plain.fingerprint, "weights and caches are the same"
    path.write_text(json.dumps({"temperature": None, "top_k": -1}))
    assert resolve_model(str(directory)).sampling_defaults.describe() == ""
    for broken in ({"temperature": "hot"}, {"top_p": 1.5}, {"top_k": True}, {"min_p": -0.1}, {"temperature": -1}):
        path.write_text(json.dumps(broken))
        with pytest.raises(ModelDamaged, match=f"generation_config.json: {next(iter(broken))} should be a number"):
            resolve_model(str(directory))


def test_minus_one_is_no_token_and_none_is_beyond_the_vocabulary(tmp_path: Path) -> None:
    config = LLAMA | {"eos_token_id": [-1, 5]}
    directory = write_model(tmp_path, config)
    spec = resolve_model(str(directory))
    assert spec.eos_token_ids == (5,)
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": 300}))
    assert resolve_model(str(directory)) == spec, "nothing is padded"
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": -1}))
    assert resolve_model(str(directory)) == spec
    for ids in (300, [4, 301]):
        path.write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(
            ModelDamaged, match=r"generation_config.json: eos_token_id is 30\d, but vocab_size is 300.*Down"
        ):
            resolve_model(str(directory))


def test_a_snapshot_in_a_hub_cache_is_called_by_its_repository(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "models--org--my--model" / "snapshots" / "0123abcd", LLAMA)
    assert resolve_model(str(directory)).name == "org/my--model"


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (["tokenizer.model"], ModelUnsupported, r"tokenizer\.json is missing \(found only tokenizer\.model"),
        (["tokenizer.json", "pytorch_model.bin"], ModelUnsupported, r"no model\.safetensors.*only pytorch_model\.bin"),
        (["vocab.json", "a.gguf"], ModelUnsupported, r"tokenizer\.json is .*only vocab.json.*only a\.gguf"),
        ([], ModelNotFound, r"config\.json is missing; tokenizer\.json is missing; it has no model\.safetensors"),
    ],
)
def test_a_checkpoint_of_other_files_says_all_that_is_missing(
    names: list[str], kind: type[ModelError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        require_files("org/name", names and [CONFIG_FILE, *names])
    assert ("save_pretrained" in caught.value.message) == bool(names)
    require_files("org/name", [CONFIG_FILE, TOKENIZER_FILE, INDEX_FILE, "pytorch_model.bin"])


def test_named_templates(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    path = directory / "tokenizer_config.json"
    path.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "A"}, {"name": "default", "template": "B"}]})
    )
    assert resolve_model(str(directory)).chat_template == "B"
    for broken in ([{"name": "tool"}], 3, [{"name": "default", "template": 3}]):
        path.write_text(json.dumps({"chat_template": broken}))
        with pytest.raises(ModelDamaged, match="chat_template"):
            resolve_model(str(directory))
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ModelDamaged, match="chat_template"):
        resolve_model(str(directory))


def test_shards(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    shapes = expected_shapes(fake_spec(LLAMA))
    (directory / "model.safetensors").unlink()
    names = sorted(shapes)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for file, part in zip(files, (names[:5], names[5:]), strict=True):
        write_safetensors(directory / file, {name: shapes[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert [Path(file).name for file in resolve_model(str(directory)).weight_files] == files
    (directory / files[1]).rename(directory / "away")
    with pytest.raises(ModelNotFound, match="00002-of-00002"):
        resolve_model(str(directory))
    maps = [f'{{"weight_map": {broken}}}' for broken in ("[]", "{}", '{"a": 3}', '{"a": "../x"}')]
    for broken in ("{", "{}", *maps):
        index.write_text(broken)
        with pytest.raises(ModelDamaged, match="index"):
            resolve_model(str(directory))


def test_fingerprint_sees_weights_and_shape_but_not_the_place(tmp_path: Path) -> None:
    first = resolve_model(str(write_model(tmp_path / "a", LLAMA)))
    same = resolve_model(str(write_model(tmp_path / "b", LLAMA)))
    others = [resolve_model(str(write_model(tmp_path / "c", LLAMA, fill=1)))]
    for number, change in enumerate(
        ({"rope_theta": 7.0}, MISTRAL | {"sliding_window": 50}, MISTRAL | {"sliding_window": 51})
    ):
        others.append(resolve_model(str(write_model(tmp_path / str(number), LLAMA | change))))
    assert first.fingerprint == same.fingerprint
    assert len({first.fingerprint, *(one.fingerprint for one in others)}) == 5


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ModelUnsupported, "Mamba"),
        ({"architectures": None, "model_type": "mamba"}, ModelUnsupported, "mamba"),
        ({"model_type": "mixtral"}, ModelUnsupported, "model_type 'mixtral', though it names .*'LlamaForCausalLM'"),
        ({"model_type": 3}, ModelUnsupported, "model_type 3, though it names"),
        ({"quantization_config": {"bits": 4}}, ModelUnsupported, "quantization_config"),
        ({"hidden_act": "gelu"}, ModelUnsupported, "hidden_act is 'gelu'; supported are 'silu', 'swish'"),
        ({"final_logit_softcapping": 30.0}, ModelUnsupported, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, ModelUnsupported, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, ModelUnsupported, "no sliding window is in use"),
        ({"layer_types": ["chunked_attention"] * 2}, ModelUnsupported, "layer_types"),
        ({"layer_types": "full_attention"}, ModelUnsupported, "layer_types"),
        ({"layer_types": ["full_attention"]}, ModelDamaged, "1 entries for 2 layers"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ModelDamaged, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e300}}, ModelDamaged, r"factor is 1e\+300"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, ModelUnsupported, "heads of 2 numb"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 1e100}, "head_dim": 4},
            ModelDamaged,
            r"factor is 1e\+100",
        ),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, ModelUnsupported, "mrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 1}, ModelDamaged, "rope_theta"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": -1000}},
            ModelDamaged,
            "mscale",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e300}}, ModelDamaged, "beta_fast"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0}},
            ModelDamaged,
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, ModelDamaged, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, ModelDamaged, "truncate"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, "x"]}}, ModelDamaged, "factor is not a list"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, ModelDamaged, "2 pairs of a head"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ModelUnsupported, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, ModelUnsupported, "partial_rotary_factor"),
        ({"torch_dtype": "int8"}, ModelUnsupported, "int8"),
        ({"rope_parameters": 3}, ModelDamaged, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelDamaged, "factor"),
        ({"hidden_size": "16"}, ModelDamaged, "hidden_size"),
        ({"hidden_size": None}, ModelDamaged, "hidden_size"),
        ({"hidden_size": -1}, ModelDamaged, "hidden_size"),
        ({"num_key_value_heads": 3}, ModelDamaged, "num_attention_heads"),
        ({"head_dim": 3}, ModelDamaged, "head_dim"),
        ({"rms_norm_eps": "x"}, ModelDamaged, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, ModelDamaged, "tie_word_embeddings"),
        ({"eos_token_id": "x"}, ModelDamaged, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, ModelDamaged, "eos_token_id"),
        ({"eos_token_id": -2}, ModelDamaged, "eos_token_id is not a token id"),
        ({"eos_token_id": 300}, ModelDamaged, "config.json: eos_token_id is 300, but vocab_size is 300"),
        ({"eos_token_id": [1, 10**400]}, ModelDamaged, "eos_token_id is 1"),
        ({"vocab_size": 301}, ModelDamaged, "embed_tokens.*shape"),
        ({"num_hidden_layers": 3}, ModelDamaged, "no tensor 'model.layers.2"),
        ({"tie_word_embeddings": False}, ModelDamaged, "no tensor 'lm_head"),
        (MISTRAL | {"sliding_window": 100, "layer_types": BOTH}, ModelUnsupported, "contradict each other"),
        (QWEN3_MOE | SLIDES | {"layer_types": BOTH}, ModelUnsupported, "contradict each other"),
        (MISTRAL | {"sliding_window": 0}, ModelDamaged, "sliding_window should be a positive integer"),
        (
            QWEN2 | SLIDES | {"max_window_layers": -1},
            ModelDamaged,
            "max_window_layers should be an integer of at least",
        ),
        (QWEN2 | {"layer_types": BOTH}, ModelUnsupported, "no sliding window is in use"),
    ],
)
def test_refused_configurations(tmp_path: Path, change: dict, kind: type, words: str) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    (directory / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(kind, match=words) as caught:
        resolve_model(str(directory))
    assert caught.value.message.endswith(".")
    assert caught.value.code.startswith("model_")


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 100}, (100, 100)),
        (MISTRAL | {"sliding_window": None}, (0, 0)),
        # The class's own default where the key is missing; it is larger than the context here.
        (MISTRAL, (0, 0)),
        (MISTRAL | {"max_position_embeddings": 8192}, (4096, 4096)),
        (MISTRAL | {"sliding_window": 512}, (0, 0)),
        (QWEN2 | SLIDES, (0, 100)),
        (QWEN2 | SLIDES | {"max_window_layers": 0}, (100, 100)),
        (QWEN2 | SLIDES | {"max_window_layers": 2}, (0, 0)),
        (QWEN2 | SLIDES | {"layer_types": BOTH}, (100, 0)),
        (QWEN2 | SLIDES | {"use_sliding_window": False}, (0, 0)),
        (QWEN2 | SLIDES | {"sliding_window": None}, (0, 0)),
        (QWEN2 | SLIDES | {"sliding_window": 600}, (0, 0)),
        (LLAMA | {"sliding_window": 100}, (0, 0)),
        (QWEN3_MOE | SLIDES, (100, 100)),
        (QWEN3_MOE | SLIDES | {"max_window_layers": 2}, (100, 100)),
        (QWEN3_MOE | SLIDES | {"use_sliding_window": False}, (0, 0)),
        (QWEN3_MOE | SLIDES | {"sliding_window": None}, (0, 0)),
    ],
)
def test_sliding_windows(tmp_path: Path, config: dict, windows: tuple[int, ...]) -> None:
    spec = resolve_model(str(write_model(tmp_path / "m", config)))
    assert spec.layer_windows == windows
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


def test_only_an_asked_context_within_the_original_chooses_short_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    long = LLAMA | {"rope_scaling": rope | {"original_max_position_embeddings": 16}, "max_position_embeddings": 64}
    spec = resolve_model(str(write_model(tmp_path / "m", long)))
    assert spec.rope.divisors == (2.0, 3.0)
    assert spec.within(0) == spec.within(17) == spec.within(64) == spec
    short = spec.within(16)
    assert short.rope.divisors == (1.0, 1.5)
    assert short.within(16) == short
    # Keys that were rotated otherwise must never be taken for this model's.
    assert len({one.kv_layout().fingerprint for one in (spec, short)}) == 2
    assert short.quantized("int8").fingerprint not in {short.fingerprint, spec.quantized("int8").fingerprint}

    never_long = LLAMA | {"rope_scaling": rope, "original_max_position_embeddings": 64, "max_position_embeddings": 64}
    spec = resolve_model(str(write_model(tmp_path / "n", never_long)))
    assert spec.rope.divisors == (1.0, 1.5)
    assert spec.within(16) == spec


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model directory 'Qwen/Qwen2\.5-0\.5B'"):
        resolve_model("Qwen/Qwen2.5-0.5B")
    directory = write_model(tmp_path / "m", LLAMA)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    headers = struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]"
    for damaged in (whole[:-1], whole + b"x", b"", b"1234567", whole[:30], *headers):
        weights.write_bytes(damaged)
        with pytest.raises(ModelDamaged, match="safetensors"):
            resolve_model(str(directory))
    shapes = expected_shapes(fake_spec(LLAMA))
    write_safetensors(weights, shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)})
    resolve_model(str(directory))
    layer = "model.layers.1.self_attn."
    write_safetensors(weights, shapes | dict.fromkeys([f"{layer}{name}_proj.bias" for name in "qkvo"], (16,)))
    with pytest.raises(ModelDamaged, match=r"does not ask for: 'model.layers.1.self_attn.q_proj.bias', .* and 1 more"):
        resolve_model(str(directory))
    for dtype in ("I8", "F64"):
        write_safetensors(weights, shapes, dtype=dtype)
        with pytest.raises(
            ModelUnsupported, match=rf"stored as {dtype}\. Weights are read in float32.*: save the model"
        ):
            resolve_model(str(directory))
    weights.rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="safetensors"):
        resolve_model(str(directory))
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        resolve_model(str(directory))
    weights.write_bytes(whole)
    tokenizer = directory / "tokenizer.json"
    tokens = tokenizer.read_text()
    tokenizer.write_text(tokens[:-5])
    with pytest.raises(ModelDamaged, match="tokenizer"):
        resolve_model(str(directory))
    tokenizer.unlink()
    with pytest.raises(ModelNotFound, match="tokenizer"):
        resolve_model(str(directory))
    tokenizer.write_text(tokens)
    for text in ("{", "[]"):
        (directory / "config.json").write_text(text)
        with pytest.raises(ModelDamaged, match=r"config\.json"):
            resolve_model(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve_model(str(directory))


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", LLAMA)
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(301))
    # Served: whoever sends one of its last tokens is told so.
    assert load_tokenizer(resolve_model(str(directory))).get_vocab_size() == 301
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelDamaged, match="cannot be loaded"):
        load_tokenizer(resolve_model(str(directory)))


def test_echo() -> None:
    spec = resolve_model("echo?step_ms=5&token_us=2.5")
    assert (spec.echo.step_ms, spec.echo.token_us) == (5.0, 2.5)
    layout = spec.kv_layout("bfloat16")
    assert (layout.page_shape, layout.dtype) == ((1, 2, 16, 1, 1), "float32")
    tokenizer = load_tokenizer(spec)
    text = "Grüße, 🐛\x00\t<|im_start|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < spec.vocab_size
    for broken in ("echo?step_ms=x", "echo?step_ms=-1", "echo?step_ms=nan", "echo?speed=3"):
        with pytest.raises(ModelUnsupported):
            resolve_model(broken)


def test_random() -> None:
    spec = resolve_model("random:qwen2.5-0.5b")
    assert (spec.dtype, spec.vocab_size, spec.qkv_bias, spec.seed) == ("bfloat16", 151_936, True, 0)
    assert sum(a * (b[0] if b else 1) for a, *b in expected_shapes(spec).values()) == 494_032_768
    other = resolve_model("random:qwen2.5-0.5b?seed=1&dtype=float32")
    assert (other.seed, other.dtype) == (1, "float32")
    assert other.fingerprint != spec.fingerprint
    assert "random:tiny-llama" in known_models()
    with pytest.raises(ModelNotFound, match="tiny-llama"):
        resolve_model("random:gpt")
    with pytest.raises(ModelUnsupported, match="float64"):
        resolve_model("random:tiny-llama?dtype=float64")
    with pytest.raises(ValueError, match="int4"):
        spec.compute_dtype("int4")


def test_every_id_of_a_random_model_has_text() -> None:
    spec = resolve_model("random:tiny-llama")
    tokenizer = load_tokenizer(spec)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in (*range(128), *range(256, spec.vocab_size))]
    assert all(text and "\ufffd" not in text for text in texts)
    assert len(set(texts)) == len(texts)
    assert tokenizer.get_vocab_size() == spec.vocab_size
    with pytest.raises(ValueError, match="259"):
        byte_tokenizer_json(200)
