"""Reads a Hugging Face model directory as transformers 4 and 5 write it: config, generation config, template, weights.

Settings that are not understood are refused (`ModelUnsupported`) rather than ignored: a wrong rotary embedding or a
missed sliding window gives fluent nonsense, not an error.
"""

import json
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from nodes.model_spec.checkpoint_files import CONFIG_FILE, TOKENIZER_FILE, require_files
from nodes.model_spec.sampling_defaults import generation_notes, read_sampling_defaults
from nodes.model_spec.text_model import TextModel, find_text_model
from nodes.model_spec.weight_index import (
    check_weights,
    find_weight_files,
    read_header,
    weights_digest,
    with_stored_head,
)
from nodes.models.config_fields import ConfigFields
from nodes.models.errors import ModelDamaged, ModelNotFound
from nodes.models.registry import ARCHITECTURES
from nodes.models.spec import ModelSpec

_WITHOUT_VISION: Final = "is served without its vision part, which is left out: it takes text only"


def read_directory(directory: Path, name: str = "") -> ModelSpec:
    """The model in `directory`, called `name` (by default the result of `name_of`). Raises `ModelError`."""
    if not directory.is_dir():
        raise ModelNotFound(
            f"There is no model directory {str(directory)!r}. Give a local directory with config.json, tokenizer.json"
            " and safetensors weights, one of tiny, echo, random:ARCH, or have `meshctl up --model ORG/NAME` fetch one."
        )
    directory = directory.resolve()
    require_files(str(directory), [path.name for path in directory.iterdir()])
    spec = read_description(directory, name)
    files = find_weight_files(directory)
    headers = {file: read_header(file) for file in files}
    config = _read_config(directory).fields
    stored = {entry.dtype for header in headers.values() for entry in header.values()}
    spec = msgspec.structs.replace(spec, dtype=config.dtype(stored), weight_files=tuple(map(str, files)))
    spec = with_stored_head(spec, headers)
    check_weights(spec, headers)
    fingerprint = f"{spec.shape_digest().hex()}-{weights_digest(files).hex()}"
    return msgspec.structs.replace(spec, fingerprint=fingerprint)


def read_description(directory: Path, name: str = "") -> ModelSpec:
    """All of `read_directory` but the weights, so that an unsupported model is refused before they are fetched."""
    name = name or name_of(directory)
    architecture, config, is_wrapped = _read_config(directory)
    template, special_tokens = read_chat_template(directory)
    path = directory / "generation_config.json"
    generation = ConfigFields(read_json(path) if path.is_file() else {}, path)
    shape = ARCHITECTURES[architecture].describe(config)
    vocab_size = shape["vocab_size"]
    eos_token_ids = [i for fields in (generation, config) for i in fields.token_ids("eos_token_id", vocab_size)]
    bos_token_ids = [i for fields in (config, generation) for i in fields.token_ids("bos_token_id", vocab_size)]
    return ModelSpec(
        name=name,
        source="directory",
        architecture=architecture,
        dtype=config.dtype(stored=set()),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        path=str(directory),
        tokenizer_path=str(_tokenizer_path(directory)),
        chat_template=template,
        special_tokens=special_tokens,
        bos_token_id=next(iter(bos_token_ids), None),
        sampling_defaults=read_sampling_defaults(generation),
        notes=(*generation_notes(name, generation), *([f"{name} {_WITHOUT_VISION}"] if is_wrapped else [])),
        **shape,
    )


def name_of(directory: Path) -> str:
    """A model's name by its location: the directory's name, or ORG/NAME in a hub cache."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelNotFound or ModelDamaged."""
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
    """Template text (None if the model has none) and the texts of its special tokens.

    `chat_template.jinja` (transformers 5) wins over `tokenizer_config.json` (transformers 4), as in transformers.
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
        return read_template_file(jinja), special_tokens
    return _template_text(document.get("chat_template"), path), special_tokens


def read_template_file(path: Path) -> str:
    """The text of a chat template. Raises ModelDamaged."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{path} cannot be read as text: {error}. Give a readable chat template.") from error


def _template_text(value: Any, path: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
        template = templates.get("default") or next(iter(templates.values()))
    except (TypeError, KeyError, AttributeError, StopIteration) as error:
        raise ModelDamaged(f"{path}: chat_template is neither a string nor a list of named templates.") from error
    if not isinstance(template, str):
        raise ModelDamaged(f"{path}: chat_template is neither a string nor a list of named templates.")
    return template


def _read_config(directory: Path) -> TextModel:
    path = directory / CONFIG_FILE
    return find_text_model(ConfigFields(read_json(path), path), directory)


def _tokenizer_path(directory: Path) -> Path:
    path = directory / TOKENIZER_FILE
    try:
        with path.open("rb") as stream:
            head = stream.read(1)
            stream.seek(max(path.stat().st_size - 64, 0))
            tail = stream.read().rstrip()
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}. Download it again.") from error
    if head != b"{" or not tail.endswith(b"}"):
        raise ModelDamaged(f"{path} is cut off or not JSON. Download it again.")
    return path
