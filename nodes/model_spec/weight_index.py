"""Which weights a model has, by name and shape, and which safetensors file each lies in; reads headers only.

Called by `directory` when a model is resolved (so a damaged download is told before any process is started) and by the
worker's loader.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from nodes.model_spec.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from nodes.model_spec.spec import ModelSpec

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
_NUM_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a safetensors header; `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def find_weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, by its index if it has one.

    Raises ModelNotFound or ModelUnsupported where there are none, ModelDamaged for a bad index.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
            files = tuple(directory / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelDamaged(f"{index} is not a safetensors index ({error!r}). Download the model again.") from error
        if any(Path(name).name != name for name in names):
            raise ModelDamaged(f"{index} names files outside its directory. Download the model again.")
        for file in files:
            if not file.is_file():
                raise ModelNotFound(f"{file} is missing, though {INDEX_FILE} names it. Download the model again.")
        return files
    if (directory / SINGLE_FILE).is_file():
        return (directory / SINGLE_FILE,)
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")) or any(directory.glob("*.gguf")):
        raise ModelUnsupported(
            f"{directory} has its weights in another format than safetensors, which may run code when loaded or is not"
            f" read here. Save the model with transformers' save_pretrained() and give that directory."
        )
    raise ModelNotFound(f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}. Give a directory with the weights.")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """All tensors of one safetensors file. Raises ModelDamaged if header and file size do not fit each other."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER_BYTES, size):
                raise ValueError(f"its header claims {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, TensorEntry])
        end = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if end != size:
            raise ValueError(f"its header speaks of {end} bytes and it has {size}")
    except (OSError, ValueError, struct.error, AttributeError, TypeError, RecursionError) as error:
        raise ModelDamaged(f"{file} is not a whole safetensors file: {error}. Download it again.") from error
    return entries


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the worker needs, named as in the checkpoints, with its shape (`[out, in]` for linears)."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    query, key = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (query, hidden, spec.qkv_bias),
        "self_attn.k_proj": (key, hidden, spec.qkv_bias),
        "self_attn.v_proj": (key, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, query, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (num_out, num_in, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_out, num_in)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (num_out,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def check_weights(spec: ModelSpec, headers: dict[Path, dict[str, TensorEntry]]) -> None:
    """Raise ModelDamaged unless every expected tensor is there once, in its shape and a floating dtype."""
    found = {name: (entry, file) for file, header in headers.items() for name, entry in header.items()}
    for name, shape in expected_shapes(spec).items():
        if name not in found:
            raise ModelDamaged(
                f"{spec.path} has no tensor {name!r}, which its config.json asks for ({len(found)} tensors found)."
                " Download the model again, or correct config.json."
            )
        entry, file = found[name]
        if entry.shape != shape:
            raise ModelDamaged(
                f"{file}: {name!r} has shape {list(entry.shape)}, config.json asks for {list(shape)}."
                " Weights and config.json are of different models: download both again."
            )
        if entry.dtype not in ("F32", "BF16", "F16"):
            raise ModelUnsupported(
                f"{file}: {name!r} is stored as {entry.dtype}. Quantised weights are not computed here; give a"
                " float32, bfloat16 or float16 model."
            )


def weights_digest(files: tuple[Path, ...]) -> bytes:
    """16 bytes from each file's size, header and evenly spread samples: two models of one shape differ in it."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            digest.update(size.to_bytes(8, "little") + stream.read(length))
            for sample in range(_NUM_SAMPLES):
                stream.seek(8 + length + (size - 8 - length) * sample // _NUM_SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
