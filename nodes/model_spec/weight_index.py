"""Which weights a checkpoint has, and whether they match its model; reads headers only.

Called by `directory` when a model is resolved (so a damaged download is reported before any process starts) and by the
worker's loader.
"""

import json
import math
import posixpath
import struct
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from nodes.model_spec.checkpoint_files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from nodes.model_spec.pooling_choice import reads_head
from nodes.model_spec.small_files import MOST_INDEX_BYTES, open_file, read_bytes
from nodes.model_spec.tensor_names import HEAD, has_both, has_head, left_over, stored_names
from nodes.models.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from nodes.models.pooling import Pooling
from nodes.models.registry import parameters
from nodes.models.spec import ModelSpec
from nodes.sizes import size_text

_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library itself."""
_DTYPES: Final = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("I64", "U64", "F64", "C64"),
}
"""All that safetensors has, by the bits that a number takes."""
_BITS: Final = {dtype: bits for bits, dtypes in _DTYPES.items() for dtype in dtypes}

_Index = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a safetensors header; `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[_Index, ...]
    data_offsets: tuple[_Index, _Index]


def find_weight_files(directory: Path) -> tuple[Path, ...]:
    """The single file, if there is one, as in transformers. Raises ModelDamaged (bad index), ModelNotFound."""
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file() or not index.exists():
        return (directory / SINGLE_FILE,)
    files = tuple(directory / name for name in files_of_index(index))
    for file in files:
        if not file.is_file():
            raise ModelNotFound(f"{file} is missing, though {INDEX_FILE} names it. Download the model again.")
    return files


def index_notes(name: str, directory: Path) -> tuple[str, ...]:
    """What people should know of an index that is not read because a single file is there."""
    index = directory / INDEX_FILE
    try:
        if not (directory / SINGLE_FILE).is_file() or not index.exists() or files_of_index(index) == [SINGLE_FILE]:
            return ()
    except ModelDamaged:
        pass
    return (f"{name} has {SINGLE_FILE}, so {INDEX_FILE} and the files that it names are not read",)


def files_of_index(index: Path) -> list[str]:
    """Names of the weight files that an index names, sorted. Raises ModelDamaged."""
    try:
        weight_map = json.loads(read_bytes(index, MOST_INDEX_BYTES))["weight_map"]
        names = sorted({posixpath.normpath(name) for name in weight_map.values()})
        is_outside = any(Path(name).name != name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelDamaged(f"{index} is not a safetensors index ({error!r}). Download the model again.") from error
    if is_outside or not names:
        raise ModelDamaged(f"{index} names no files, or files outside its directory. Download the model again.")
    return names


def read_header(file: Path) -> dict[str, TensorEntry]:
    """All tensors of one safetensors file. Raises ModelDamaged for a header that safetensors would not take."""
    try:
        size = file.stat().st_size
        with open_file(file) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER_BYTES, size):
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_without_duplicates)
        msgspec.convert(header.pop("__metadata__", None), dict[str, str] | None)
        entries = msgspec.convert(header, dict[str, TensorEntry])
        end = 8 + length + _data_bytes(entries)
        if end != size:
            raise ValueError(f"its header describes {end} bytes, but it has {size}")
    except (OSError, ValueError, struct.error, AttributeError, TypeError, RecursionError) as error:
        raise ModelDamaged(f"{file} is not a complete safetensors file: {error}. Download it again.") from error
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {name!r} twice")
    return found


def _data_bytes(entries: dict[str, TensorEntry]) -> int:
    """Of all tensors, which follow each other without gaps. Raises ValueError."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, next_end = entry.data_offsets
        if begin != end:
            raise ValueError(f"the tensor {name!r} begins at byte {begin}, but the one before it ends at {end}")
        if entry.dtype not in _BITS:
            raise ValueError(f"the tensor {name!r} is of {entry.dtype!r}, which is no dtype")
        if math.prod(entry.shape) * _BITS[entry.dtype] != (next_end - begin) * 8:
            shape = f"{entry.dtype} of shape {list(entry.shape)}"
            raise ValueError(f"the tensor {name!r} is {shape}, but has {next_end - begin} bytes")
        end = next_end
    return end


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the worker needs, named as in the checkpoints, with its shape (`[out, in]` for linears)."""
    return {name: parameter.shape for name, parameter in parameters(spec).items()}


def with_stored_head(spec: ModelSpec, headers: dict[Path, dict[str, TensorEntry]]) -> ModelSpec:
    """`spec`, with a head of its own if one is stored beside the embedding, whatever `tie_word_embeddings` says.
    transformers compares the two and ties them if they are alike. Not here: that takes reading both.

    A network that is called as one without a head has one all the same if it is stored. One that makes vectors, and
    has none though its embedding is not tied, was saved without it.
    """
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    if not spec.has_head:
        return msgspec.structs.replace(spec, has_head=has_both(found), tie_word_embeddings=not has_both(found))
    if not spec.tie_word_embeddings:
        is_left_out = spec.pooling is not None and not reads_head(spec.pooling) and not has_head(found)
        return msgspec.structs.replace(spec, has_head=False, tie_word_embeddings=True) if is_left_out else spec
    if not has_both(found):
        return spec
    begin, end = found[stored_names([HEAD], found)[HEAD]].data_offsets
    note = (
        f"{spec.name} has a head beside its embedding, though its config.json ties them (tie_word_embeddings): the head"
        f" is used, and takes {size_text(end - begin)} as stored, also if it is a copy of the embedding"
    )
    return msgspec.structs.replace(spec, tie_word_embeddings=False, notes=(*spec.notes, note))


def check_weights(spec: ModelSpec, headers: dict[Path, dict[str, TensorEntry]]) -> None:
    """Raises ModelDamaged unless exactly the expected tensors are there, ModelUnsupported for their dtype."""
    found = {name: (entry, file) for file, header in headers.items() for name, entry in header.items()}
    num_experts = (spec.num_layers - len(spec.dense_layers)) * spec.num_experts
    # Before the layers are listed: numbers that are wrong may ask for more of them than fit into memory.
    if spec.num_layers + num_experts > len(found):
        raise ModelDamaged(
            f"{spec.path} has {len(found)} tensors, but its config.json asks for {spec.num_layers} layers"
            f"{f' with {num_experts} experts in all' if num_experts else ''} (num_hidden_layers)."
            " Download the model again, or correct config.json."
        )
    expected = expected_shapes(spec)
    names = stored_names(expected, found)
    for name, shape in ((names[own], shape) for own, shape in expected.items()):
        if name not in found:
            raise ModelDamaged(
                f"{spec.path} has no tensor {name!r}, which its config.json asks for ({len(found)} tensors found)."
                " Download the model again, or correct config.json."
            )
        _check_tensor(name, *found[name], shape, CONFIG_FILE)
    if extra := left_over(names, found):
        named = ", ".join(map(repr, extra[:3])) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
        raise ModelDamaged(
            f"{spec.path} has tensors that its config.json does not ask for: {named}. Ignoring them would change"
            " the output: correct config.json, or serve another model."
        )


def check_dense(pooling: Pooling | None) -> tuple[Path, ...]:
    """The files beside a model's weights that products behind its pooling lie in, each checked as `check_weights` does.

    Raises ModelNotFound, ModelDamaged or ModelUnsupported.
    """
    checked: list[Path] = []
    for dense in pooling.dense if pooling else ():
        if not dense.path:
            continue
        file = Path(dense.path)
        if not file.is_file():
            if (other := file.with_name("pytorch_model.bin")).exists():
                raise ModelUnsupported(
                    f"{file} is missing; {other.name} beside it is not read, because such files may run code when they"
                    " are loaded. Save the model once with sentence-transformers, then give that directory."
                )
            raise ModelNotFound(f"{file} is missing. Give a complete model of sentence-transformers.")
        header = read_header(file)
        shapes = {dense.weight: (dense.num_out, dense.num_in)} | ({dense.bias: (dense.num_out,)} if dense.bias else {})
        if set(header) != set(shapes):
            raise ModelDamaged(
                f"{file} has the tensors {', '.join(sorted(header))}, but {CONFIG_FILE} beside it asks for"
                f" {', '.join(shapes)}. Download the model again."
            )
        for name, shape in shapes.items():
            _check_tensor(name, header[name], file, shape, f"{file.parent.name}/{CONFIG_FILE}")
        checked.append(file)
    return tuple(checked)


def _check_tensor(name: str, entry: TensorEntry, file: Path, shape: tuple[int, ...], config: str) -> None:
    if entry.shape != shape:
        raise ModelDamaged(
            f"{file}: {name!r} has shape {list(entry.shape)}, but {config} asks for {list(shape)}."
            f" Weights and {config} belong to different models: download both again."
        )
    if entry.dtype not in ("F32", "BF16", "F16"):
        raise ModelUnsupported(
            f"{file}: {name!r} is stored as {entry.dtype}. Weights are read in float32, bfloat16 and float16 only,"
            " not quantised ones: save the model in one of these, or give another."
        )
