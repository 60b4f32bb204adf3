"""Reads a Hugging Face model directory as transformers 4 and 5 write it: config, generation config, template, weights.

Settings that are not understood are refused (`ModelUnsupported`) rather than ignored: a wrong rotary embedding or a
missed sliding window gives fluent nonsense, not an error.
"""

from pathlib import Path
from typing import Final

import msgspec

from nodes.model_spec.checkpoint_files import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE, require_files
from nodes.model_spec.end_tokens import configured_ends
from nodes.model_spec.pooling_choice import with_rows_of_head
from nodes.model_spec.pooling_files import read_pooling
from nodes.model_spec.sampling_defaults import generation_notes, read_sampling_defaults
from nodes.model_spec.small_files import MOST_TOKENIZER_BYTES, SmallFiles, open_file
from nodes.model_spec.template_files import PROCESSOR_TEMPLATE, TemplateFound, find_template
from nodes.model_spec.text_model import TextModel, find_text_model
from nodes.model_spec.token_files import ADDED, SPECIAL_MAP, TOKENIZER_CONFIG, TokenFiles, read_token_files
from nodes.model_spec.vector_heads import has_no_head, head_pooling
from nodes.model_spec.weight_index import (
    check_dense,
    check_weights,
    find_weight_files,
    index_notes,
    read_header,
    with_stored_head,
)
from nodes.models.config_fields import ConfigFields
from nodes.models.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from nodes.models.registry import ARCHITECTURES
from nodes.models.spec import ModelSpec

_EDGE_BYTES: Final = 4096
"""Looked at, at both ends of tokenizer.json: a file that somebody has edited may begin or end with blank lines."""


def read_directory(directory: Path, name: str = "") -> ModelSpec:
    """The model in `directory`, called `name` (by default the result of `name_of`), without its fingerprint.

    Raises `ModelError`.
    """
    try:
        return _read(directory, name)
    except OSError as error:
        # Of looking for files: whoever opens one words its own errors.
        path = str(error.filename or directory)
        raise ModelNotFound(
            f"{path!r} cannot be read: {error.strerror}. Give a model directory that this user may list and read."
        ) from error


def _read(directory: Path, name: str) -> ModelSpec:
    if not directory.is_dir():
        raise ModelNotFound(
            f"There is no model directory {str(directory)!r}. Give a local directory with config.json, tokenizer.json"
            " and safetensors weights, one of tiny, echo, random:ARCH, or have `meshctl up --model ORG/NAME` fetch one."
        )
    directory = directory.resolve()
    if not _is_text(str(directory)):
        raise ModelUnsupported(
            f"The path of the model directory {str(directory)!r} is not UTF-8, and actors are told it as text."
            " Rename what is not."
        )
    require_files(str(directory), [path.name for path in directory.iterdir()])
    spec = read_description(directory, name)
    files = find_weight_files(directory)
    headers = {file: read_header(file) for file in files}
    config = _read_config(SmallFiles(directory)).fields
    stored = {entry.dtype for header in headers.values() for entry in header.values()}
    spec = msgspec.structs.replace(
        spec,
        dtype=config.dtype(stored),
        weight_files=tuple(map(str, files)),
        notes=(*spec.notes, *index_notes(spec.name, directory)),
    )
    spec = with_rows_of_head(with_stored_head(spec, headers))
    check_weights(spec, headers)
    check_dense(spec.pooling)
    return spec


def read_description(directory: Path, name: str = "") -> ModelSpec:
    """All of `read_directory` but the weights, so that an unsupported model is refused before they are fetched."""
    name = name or name_of(directory)
    files = SmallFiles(directory)
    architecture, config, notes, called = _read_config(files)
    generation = ConfigFields(files.find(GENERATION_FILE), directory / GENERATION_FILE)
    network = ARCHITECTURES[architecture]
    shape = network.describe(config)
    tokens, template = read_texts(directory)
    head = head_pooling(called, config, shape["hidden_size"], network)
    vocab_size = shape["vocab_size"]
    ends = configured_ends(generation, config, vocab_size)
    said_by = {f"eos_token_ids.{i}": file for i, file in ends.items()}
    said_by |= {f"special_tokens.{name}": file for name, file in tokens.said_by.items()}
    return ModelSpec(
        name=name,
        source="directory",
        architecture=architecture,
        dtype=config.dtype(stored=set()),
        eos_token_ids=tuple(ends),
        path=str(directory),
        tokenizer_path=str(_tokenizer_path(directory)),
        chat_template=template.source,
        named_templates=template.named,
        special_tokens=tokens.named,
        added_tokens=tokens.added,
        own_ids_win=tokens.own_ids_win,
        split_special_tokens=tokens.split_special_tokens,
        said_by=said_by | ({"chat_template": template.said_by} if template.said_by else {}),
        sampling_defaults=read_sampling_defaults(generation),
        notes=(*generation_notes(name, generation), *(f"{name} {note}" for note in notes)),
        pooling=read_pooling(files, shape, head),
        has_head=not (has_no_head(called) or shape.get("is_encoder")),
        **shape,
    )


def read_texts(directory: Path) -> tuple[TokenFiles, TemplateFound]:
    """Special tokens and chat template, which need no config.json. Raises ModelDamaged."""
    files = SmallFiles(directory)
    config = files.find(TOKENIZER_CONFIG)
    try:
        return read_token_files(config, files.find(SPECIAL_MAP), files.find(ADDED)), find_template(
            directory, config, files.find(PROCESSOR_TEMPLATE)
        )
    except ModelDamaged as error:
        # Who reads them knows the name of a file, not where it is.
        path = "" if str(directory) in error.message else f"{directory}/"
        raise ModelDamaged(f"{path}{error.message}") from error


def name_of(directory: Path) -> str:
    """A model's name by its location: the directory's name, or ORG/NAME in a hub cache."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_config(files: SmallFiles) -> TextModel:
    path = files.directory / CONFIG_FILE
    return find_text_model(ConfigFields(files.require(CONFIG_FILE), path), path)


def _tokenizer_path(directory: Path) -> Path:
    path = directory / TOKENIZER_FILE
    try:
        if (size := path.stat().st_size) > MOST_TOKENIZER_BYTES:
            raise ModelDamaged(
                f"{path} has {size:,} bytes, {MOST_TOKENIZER_BYTES:,} at most are read. Download it again."
            )
        with open_file(path) as stream:
            head = stream.read(_EDGE_BYTES).lstrip()[:1]
            stream.seek(max(size - _EDGE_BYTES, 0))
            tail = stream.read().rstrip()
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}. Download it again.") from error
    if head != b"{" or not tail.endswith(b"}"):
        raise ModelDamaged(f"{path} is cut off or not JSON. Download it again.")
    return path
