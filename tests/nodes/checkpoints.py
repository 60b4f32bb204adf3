"""Small checkpoints with weights of one value, written without torch: directories as transformers makes them."""

import json
import struct
from pathlib import Path

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelSpec
from nodes.model_spec.vector_heads import head_pooling
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.config_fields import ConfigFields
from nodes.models.registry import ARCHITECTURES

SHAPE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2}


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32", fill: int = 0) -> None:
    header, end, width = {}, 0, {"F64": 8, "F32": 4, "I8": 1}[dtype]
    for name, shape in shapes.items():
        size = width
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([fill]) * end)


def write_model(directory: Path, config: dict, *, fill: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(byte_tokenizer_json(config["vocab_size"]))
    write_safetensors(directory / "model.safetensors", expected_shapes(fake_spec(config)), fill=fill)
    return directory


def fake_spec(config: dict) -> ModelSpec:
    architecture = config["model_type"]
    fields = ConfigFields(config, Path("config.json"))
    shape = ARCHITECTURES[architecture].describe(fields)
    called = (config.get("architectures") or [""])[0]
    pooling = head_pooling(called, fields, shape["hidden_size"], ARCHITECTURES[architecture])
    return ModelSpec(name="", source="directory", architecture=architecture, dtype="float32", pooling=pooling, **shape)


def write_modules(directory: Path, *modules: str | tuple[str, dict], **others: dict) -> Path:
    """What sentence-transformers writes beside a model: modules after the Transformer, by kind with their config, and
    other files, with `__` for a dot.
    """
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for one in modules:
        number = len(entries)
        kind, config = (one, {}) if isinstance(one, str) else one
        path = f"{number}_{kind}"
        entries.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (directory / path).mkdir(exist_ok=True)
        (directory / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            shapes = {"linear.weight": (config["out_features"], config["in_features"])}
            shapes |= {"linear.bias": (config["out_features"],)} if config.get("bias", True) else {}
            write_safetensors(directory / path / "model.safetensors", shapes)
    (directory / "modules.json").write_text(json.dumps(entries))
    for name, content in others.items():
        (directory / name.replace("__", ".")).write_text(json.dumps(content))
    return directory
