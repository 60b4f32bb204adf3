"""What a model's folder says of vectors, as sentence-transformers writes it since its release 2.

    modules.json                           what is computed, in order: Transformer, Pooling, any number of Dense,
                                           Normalize; or of a cross encoder, Transformer alone or with LogitScore
    1_Pooling/config.json                  `pooling_mode`, before release 5.4 a flag for each mode
    2_Dense/config.json                    a product, whose weights lie in 2_Dense/model.safetensors
    config_sentence_transformers.json      prompts, the kind of model, a cross encoder's activation
    sentence_bert_config.json              the longest input, and what the transformer is asked for

Whatever else these files ask for is refused (`ModelUnsupported`): a wrong pooling gives plausible vectors, not an
error. Used by `directory.py`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from nodes.model_spec.checkpoint_files import (
    CONFIG_FILE,
    MODULES_FILE,
    PROMPTS_FILE,
    SINGLE_FILE,
    TOKENIZER_FILE,
    TRANSFORMER_FILES,
)
from nodes.model_spec.small_files import MOST_TOKENIZER_BYTES, SmallFiles
from nodes.model_spec.tensor_names import HEAD
from nodes.model_spec.token_files import TOKENIZER_CONFIG
from nodes.model_spec.vector_heads import activation_called, class_of_torch
from nodes.models.config_fields import ConfigFields
from nodes.models.errors import ModelDamaged, ModelUnsupported
from nodes.models.pooling import Activation, Dense, DenseActivation, Pool, Pooling

_EMBEDDER: Final = "SentenceTransformer"
_CROSS: Final = "CrossEncoder"
_POOLS: Final[dict[str, Pool]] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Final[dict[str, DenseActivation]] = {
    "Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid",
}  # fmt: skip
_TASKS: Final = {
    "": ("sequence-classification", "logits"),
    "LogitScore": ("text-generation", "logits"),
    "Pooling": ("feature-extraction", "last_hidden_state"),
}
"""By what follows the transformer, if anything: what it is asked for, and which of its results is taken."""
_HARMLESS: Final = frozenset(
    {"attn_implementation", "dtype", "padding_side", "torch_dtype", "trust_remote_code", "use_cache", "use_fast"}
)
"""Arguments for loading a model or tokenizer that change nothing here."""
_ARGUMENTS: Final = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")


class _Module(NamedTuple):
    kind: str
    config: ConfigFields
    folder: Path


def read_pooling(files: SmallFiles, shape: dict[str, Any], head: Pooling | None) -> Pooling | None:
    """What a folder says of vectors; None: nothing. `head` is what the architecture itself makes of the last position,
    `shape` are fields of its `ModelSpec`. Raises ModelNotFound, ModelDamaged or ModelUnsupported.
    """
    texts = ConfigFields(files.find(TOKENIZER_CONFIG), files.directory / TOKENIZER_CONFIG)
    if not files.has(MODULES_FILE):
        return head and msgspec.structs.replace(head, max_length=_longest(texts, "model_max_length", shape))
    first, *others = _modules(files)
    prompts = ConfigFields(files.find(PROMPTS_FILE), files.directory / PROMPTS_FILE)
    kinds = [one.kind for one in others]
    then = kinds[0] if kinds else ""
    if first.kind != "Transformer" or then not in _TASKS or (len(kinds) > 1 and then != "Pooling"):
        raise _unsupported(files, f"names {', '.join((first.kind, *kinds))} in this order")
    _check_transformer(first.config, *_TASKS[then])
    prompts.require("model_type", *((None, _EMBEDDER) if then == "Pooling" else ()), _CROSS)
    if then == "LogitScore":
        pooling = _by_words(others[0].config, prompts, shape)
    elif then:
        pooling = _by_layers(files, others, prompts, shape["hidden_size"])
    elif head is None:
        raise _unsupported(files, "names a Transformer alone, though its architecture has no head for scores")
    else:
        pooling = msgspec.structs.replace(head, activation=_activation(prompts, head.activation))
    if first.config.boolean("do_lower_case"):
        _require_lower_case(files, first.config)
    limits = (first.config, "max_seq_length") if first.config.value("max_seq_length") else (texts, "model_max_length")
    named = _prompts(prompts)
    # The last state is the same whichever positions are counted; a mean would have to leave out those of the prompt.
    if any(named.values()) and not _includes_prompt(others) and pooling.pool != "last":
        raise others[0].config.unsupported("include_prompt", "is false, though there are prompts")
    return msgspec.structs.replace(
        pooling,
        prompts=named,
        default_prompt=_default_prompt(prompts, named),
        max_length=_longest(*limits, shape),
    )


def _modules(files: SmallFiles) -> list[_Module]:
    """The modules of a folder, at least one. Raises ModelUnsupported for one that is not of sentence-transformers."""
    found: list[_Module] = []
    for entry in files.require_objects(MODULES_FILE):
        fields = ConfigFields(entry, files.directory / MODULES_FILE)
        package, _, kind = str(entry.get("type")).rpartition(".")
        if not package.startswith("sentence_transformers."):
            raise fields.unsupported("type", f"is {entry.get('type')!r}, which is no module of sentence-transformers")
        if entry.get("kwargs"):
            raise fields.unsupported("kwargs", f"of {kind} asks for {entry['kwargs']!r}")
        path: Any = entry.get("path")
        # The first of them is the model itself.
        is_folder = isinstance(path, str) and path == os.path.basename(path) and path.isprintable()
        if not is_folder or path in (".", "..") or bool(path) != bool(found):
            raise fields.unsupported("path", f"of {kind} is {path!r}, not {'a folder' if found else 'empty'}")
        name = f"{path}/{CONFIG_FILE}" if path else _transformer_file(files)
        # A Normalize of an older release has no file of its own.
        document = files.require(name) if kind in ("Pooling", "Dense", "LogitScore") else files.find(name)
        found.append(_Module(kind, ConfigFields(document, files.directory / name), files.directory / path))
    if not found:
        raise ModelDamaged(f"{files.directory / MODULES_FILE} names no modules. Download it again.")
    return found


def _transformer_file(files: SmallFiles) -> str:
    return next((name for name in TRANSFORMER_FILES if files.has(name) and files.find(name)), TRANSFORMER_FILES[0])


def _check_transformer(config: ConfigFields, task: str, result: str) -> None:
    """Raises ModelUnsupported unless the transformer is asked for what is computed here."""
    if (asked_for := config.value("transformer_task") or "feature-extraction") != task:
        raise config.unsupported("transformer_task", f"is {asked_for!r}, not {task}, as what follows it needs")
    for key in ("query_length", "document_length", "query_expansion"):
        config.require(key, None)
    # What a cross encoder says of its template is for who writes the text.
    of_template = {"chat_template"} if task == "text-generation" else set[str]()
    for key, harmless in {**dict.fromkeys(_ARGUMENTS, _HARMLESS), "processing_kwargs": of_template}.items():
        if asked := sorted(set(_object(config, key)) - harmless):
            raise config.unsupported(key, f"asks for {', '.join(asked)}")
    wanted = {"method": "forward", "method_output_name": result}
    if (text := _object(config, "modality_config").get("text", wanted)) != wanted:
        raise config.unsupported("modality_config", f"asks for {text!r} of a text, not {wanted!r}")


def _by_words(config: ConfigFields, prompts: ConfigFields, shape: dict[str, Any]) -> Pooling:
    """The score by the logits of two words, or of one: rows of the model's own head (LogitScore)."""
    yes = config.integer("true_token_id", least=0, most=shape["vocab_size"] - 1)
    if config.value("false_token_id") is None:
        return Pooling(
            pool="last",
            kind="score",
            dense=(Dense(shape["hidden_size"], 1, HEAD, rows=(yes,)),),
            activation=_activation(prompts, "sigmoid"),
        )
    no = config.integer("false_token_id", least=0, most=shape["vocab_size"] - 1)
    return yes_no(shape["hidden_size"], no, yes)


def yes_no(hidden_size: int, no: int, yes: int) -> Pooling:
    """The score by the logits of two tokens, which are rows of the model's own head."""
    return Pooling(
        pool="last", kind="yes_no", dense=(Dense(hidden_size, 2, HEAD, rows=(no, yes)),), activation="softmax"
    )


def _by_layers(files: SmallFiles, modules: Sequence[_Module], prompts: ConfigFields, hidden_size: int) -> Pooling:
    """Pooling, then Dense as often as one likes, then Normalize if at all."""
    pooled, *others = modules
    normalize = bool(others) and others[-1].kind == "Normalize"
    layers = others[:-1] if normalize else others
    is_cross = prompts.value("model_type") == _CROSS
    if any(one.kind != "Dense" for one in layers) or (is_cross and (normalize or not layers)):
        raise _unsupported(files, f"names {', '.join(one.kind for one in modules)} after the Transformer")
    size = _checked_size(pooled.config, ("embedding_dimension", "word_embedding_dimension"), hidden_size)
    dense: list[Dense] = []
    for one in layers:
        dense.append(_dense(one, size, is_last_of="scores" if is_cross and one is layers[-1] else "sentence_embedding"))
        size = dense[-1].num_out
    if normalize:
        for key in ("module_input_name", "module_output_name"):
            others[-1].config.require(key, None, "sentence_embedding")
    prompts.require("truncate_dim", None)
    pooling = Pooling(pool=_pool(pooled.config), normalize=normalize, dense=tuple(dense))
    if not is_cross:
        return pooling
    return msgspec.structs.replace(
        pooling,
        kind="score" if size == 1 else "classify",
        labels=tuple(f"LABEL_{number}" for number in range(size)),
        activation=_activation(prompts, "sigmoid" if size == 1 else "identity"),
    )


def _pool(config: ConfigFields) -> Pool:
    """The one mode of a Pooling, as sentence-transformers reads both spellings."""
    given: Any = config.value("pooling_mode")
    if given is None:
        # Without any flag it takes the mean.
        flags = [mode for key, mode in _FLAGS.items() if config.boolean(key)]
        modes: list[Any] = flags or ["mean"]
    else:
        modes = cast("list[Any]", given) if isinstance(given, list) else [given]
    named = ", ".join(map(str, modes))
    if len(modes) != 1:
        raise config.unsupported("pooling_mode", f"names several at once: {named}")
    if modes[0] not in tuple(_POOLS):
        raise config.unsupported("pooling_mode", f"is {named}; supported are {', '.join(_POOLS)}")
    return _POOLS[modes[0]]


def _dense(module: _Module, num_in: int, is_last_of: str) -> Dense:
    config = module.config
    _checked_size(config, ("in_features",), num_in)
    config.require("module_input_name", None, "sentence_embedding")
    config.require("module_output_name", *((None,) if is_last_of == "sentence_embedding" else ()), is_last_of)
    config.require("use_residual", None, False)
    # The library's own default, where a file names none, is tanh.
    named = config.value("activation_function") is not None
    return Dense(
        num_in,
        config.integer("out_features"),
        "linear.weight",
        "linear.bias" if config.boolean("bias", default=True) else "",
        activation=class_of_torch(config, "activation_function", _ACTIVATIONS) if named else "tanh",
        path=str(module.folder / SINGLE_FILE),
    )


def _checked_size(config: ConfigFields, keys: Sequence[str], size: int) -> int:
    """`size`, which the first of `keys` that is there must say too. Raises ModelDamaged."""
    key = next((key for key in keys if config.value(key) is not None), keys[0])
    if config.integer(key) != size:
        raise config.damaged(key, f"is {config.integer(key)}, but what comes before has {size} numbers")
    return size


def _activation(prompts: ConfigFields, default: Activation) -> Activation:
    return default if prompts.value("activation_fn") is None else activation_called(prompts, "activation_fn")


def _object(config: ConfigFields, key: str) -> dict[str, Any]:
    """The object of a field, empty if there is none. Raises ModelDamaged."""
    given: Any = config.value(key)
    if not isinstance(given, dict | None):
        raise config.damaged(key, f"should be an object, not {given!r}")
    return cast("dict[str, Any]", given or {})


def _prompts(config: ConfigFields) -> dict[str, str]:
    found = _object(config, "prompts")
    if name := next((name for name, text in found.items() if not isinstance(text, str | None)), None):
        raise config.damaged("prompts", f"has {found[name]!r} as {name}, which is no text")
    return {name: text or "" for name, text in found.items()}


def _default_prompt(config: ConfigFields, prompts: dict[str, str]) -> str:
    name: Any = config.value("default_prompt_name")
    if name is not None and name not in tuple(prompts):
        raise config.damaged("default_prompt_name", f"is {name!r}, which prompts does not have")
    return name or ""


def _includes_prompt(modules: Sequence[_Module]) -> bool:
    return all(one.config.boolean("include_prompt", default=True) for one in modules if one.kind == "Pooling")


def _longest(config: ConfigFields, key: str, shape: dict[str, Any]) -> int:
    """The longest input in tokens that a field says; 0: none, or at least the model's context."""
    given: Any = config.value(key)
    # A tokenizer without a limit says 1e30, as a number of either kind.
    if given is None or (isinstance(given, int | float) and given >= shape["context_length"]):
        return 0
    return config.integer(key)


def _require_lower_case(files: SmallFiles, config: ConfigFields) -> None:
    """Raises ModelUnsupported unless the tokenizer itself makes texts lower case, as `do_lower_case` asks for."""
    path = files.directory / TOKENIZER_FILE
    own = _object(ConfigFields(files.require(TOKENIZER_FILE, MOST_TOKENIZER_BYTES), path), "normalizer")
    parts: Any = own.get("normalizers", [own])
    for part in cast("list[Any]", parts if isinstance(parts, list) else []):
        # Pieces of any other form are for the library to refuse, which loads the file later.
        fields = cast("dict[str, Any]", part if isinstance(part, dict) else {})
        if fields.get("type") == "Lowercase" or (fields.get("type") == "BertNormalizer" and fields.get("lowercase")):
            return
    raise config.unsupported(
        "do_lower_case", f'is true, but {TOKENIZER_FILE} does not: put {{"type": "Lowercase"}} first in its normalizer'
    )


def _unsupported(files: SmallFiles, what: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{files.directory / MODULES_FILE} {what}, which is not supported: vectors are made by Transformer, Pooling,"
        " Dense, Normalize, scores by Transformer and LogitScore. Serve another model, or remove the file to serve it"
        " without vectors."
    )
