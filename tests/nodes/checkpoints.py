"""Small checkpoints with weights of one value, written without torch: directories as transformers makes them."""

import json
import struct
from pathlib import Path

from nodes.bundled.byte_tokenizer import byte_tokenizer_json
from nodes.model_spec import ModelSpec
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
    shape = ARCHITECTURES[architecture].describe(ConfigFields(config, Path("config.json")))
    return ModelSpec(name="", source="directory", architecture=architecture, dtype="float32", **shape)
