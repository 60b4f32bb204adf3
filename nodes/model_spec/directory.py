"""Reads a Hugging Face model directory as transformers 4 and 5 write it: config, generation config, template, weights.

What is not understood is refused (`ModelUnsupported`) rather than ignored: a wrong rotary embedding or a missed sliding
window gives fluent nonsense, not an error.
"""

import json
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from nodes.model_spec.config_fields import ConfigFields
from nodes.model_spec.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from nodes.model_spec.spec import ModelSpec
from nodes.model_spec.weight_index import check_weights, find_weight_files, read_header, weights_digest

ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MODEL_TYPES: Final = frozenset(ARCHITECTURES.values())


def read_directory(directory: Path, name: str = "") -> ModelSpec:
    """The model in `directory`, called `name` (the directory's own name by default). Raises `ModelError`."""
    if not directory.is_dir():
        raise ModelNotFound(
            f"There is no model directory {str(directory)!r}. Give a local directory with config.json, tokenizer.json"
            " and safetensors weights (nothing is downloaded), or one of tiny, echo, random:ARCH."
        )
    directory = directory.resolve()
    document = read_json(directory / "config.json")
    config = ConfigFields(document, directory / "config.json")
    architecture = _architecture(config, directory)
    tokenizer_path = _tokenizer_path(directory)
    template, special_tokens = read_chat_template(directory)
    files = find_weight_files(directory)
    headers = {file: read_header(file) for file in files}
    spec = ModelSpec(
        name=name or directory.name,
        source="directory",
        architecture=architecture,  # pyright: ignore[reportArgumentType] # checked against the literals' own table
        dtype=config.dtype(stored={entry.dtype for header in headers.values() for entry in header.values()}),
        eos_token_ids=_eos_token_ids(config, directory),
        path=str(directory),
        tokenizer_path=str(tokenizer_path),
        chat_template=template,
        special_tokens=special_tokens,
        weight_files=tuple(map(str, files)),
        bos_token_id=config.token_id("bos_token_id"),
        **config.shape(architecture),
    )
    check_weights(spec, headers)
    fingerprint = f"{spec.shape_digest().hex()}-{weights_digest(files).hex()}"
    return msgspec.structs.replace(spec, fingerprint=fingerprint)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top is an object. Raises ModelNotFound or ModelDamaged."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} is missing. Give a complete Hugging Face model directory.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(document, dict):
        raise ModelDamaged(f"{path} should hold a JSON object. Download it again.")
    return cast("dict[str, Any]", document)


def read_chat_template(directory: Path) -> tuple[str | None, dict[str, str]]:
    """Template text (None where the model has none) and the texts of its special tokens.

    `chat_template.jinja` (transformers 5) goes before `tokenizer_config.json` (transformers 4), as in transformers.
    """
    path = directory / "tokenizer_config.json"
    document = read_json(path) if path.is_file() else {}
    special_tokens: dict[str, str] = {}
    for key, value in document.items():
        text: Any = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special_tokens[key] = text
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8"), special_tokens
        except (OSError, ValueError) as error:
            raise ModelDamaged(f"{jinja} cannot be read as text: {error}. Download it again.") from error
    return _template_text(document.get("chat_template"), path), special_tokens


def _template_text(value: Any, path: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
        template = templates.get("default") or next(iter(templates.values()))
    except (TypeError, KeyError, AttributeError, StopIteration) as error:
        raise ModelDamaged(f"{path}: chat_template is neither a text nor a list of named texts.") from error
    if not isinstance(template, str):
        raise ModelDamaged(f"{path}: chat_template is neither a text nor a list of named texts.")
    return template


def _architecture(config: ConfigFields, directory: Path) -> str:
    names: Any = config.value("architectures") or []
    model_type: Any = config.value("model_type")
    if isinstance(names, list) and names:
        found = [ARCHITECTURES[n] for n in cast("list[Any]", names) if isinstance(n, str) and n in ARCHITECTURES]
        if found:
            return found[0]
    elif model_type in _MODEL_TYPES:
        return str(model_type)
    raise ModelUnsupported(
        f"{directory} is of architecture {names or model_type!r}. Supported are {', '.join(ARCHITECTURES)}."
    )


def _tokenizer_path(directory: Path) -> Path:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(
            f"{path} is missing. Other tokenizer files are not read here: save the tokenizer with transformers'"
            " AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes tokenizer.json."
        )
    with path.open("rb") as stream:
        head = stream.read(1)
        stream.seek(max(path.stat().st_size - 64, 0))
        tail = stream.read().rstrip()
    if head != b"{" or not tail.endswith(b"}"):
        raise ModelDamaged(f"{path} is cut off or not JSON. Download it again.")
    return path


def _eos_token_ids(config: ConfigFields, directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = ConfigFields(read_json(path), path) if path.is_file() else None
    ids = [*(generation.token_ids("eos_token_id") if generation else ()), *config.token_ids("eos_token_id")]
    return tuple(dict.fromkeys(ids))
