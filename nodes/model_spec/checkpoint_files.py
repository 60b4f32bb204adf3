"""Which files of a checkpoint are read here, and the error for a checkpoint that lacks some. Pure.

Applied to a directory's files (`directory.py`) and, before anything is fetched, to the list that a hub gives.
"""

import re
from collections.abc import Collection, Iterable
from typing import Final

from nodes.model_spec.template_files import PROCESSOR_TEMPLATE, TEMPLATE_FILE, TEMPLATE_FOLDER
from nodes.model_spec.token_files import ADDED, SPECIAL_MAP, TOKENIZER_CONFIG
from nodes.models.errors import ModelNotFound, ModelUnsupported

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
GENERATION_FILE: Final = "generation_config.json"
MODULES_FILE: Final = "modules.json"
PROMPTS_FILE: Final = "config_sentence_transformers.json"
TRANSFORMER_FILES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Of sentence-transformers, which reads the first of them that is there."""
SMALL_FILES: Final = (
    CONFIG_FILE,
    TOKENIZER_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG,
    SPECIAL_MAP,
    ADDED,
    TEMPLATE_FILE,
    PROCESSOR_TEMPLATE,
    INDEX_FILE,
    MODULES_FILE,
    PROMPTS_FILE,
    *TRANSFORMER_FILES,
)
"""Everything in the folder itself that is read besides the weights; some of these files are optional."""
_OF_MODULE: Final = re.compile(r"[0-9]+_[A-Za-z]+/config\.json")
"""As sentence-transformers names the folders of its modules; the weights of one are fetched with the model's."""

_OTHER_TOKENIZERS: Final = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_OTHER_WEIGHTS: Final = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")


def small_files(names: Iterable[str]) -> list[str]:
    """Those of `names`, paths in a model's directory, that are read besides its weights."""
    return [
        name
        for name in names
        if name in SMALL_FILES
        or (name.startswith(f"{TEMPLATE_FOLDER}/") and name.endswith(".jinja"))
        or _OF_MODULE.fullmatch(name)
    ]


def require_files(where: str, names: Collection[str]) -> None:
    """Raise ModelNotFound or ModelUnsupported, naming everything missing, unless the files `names` can be served."""
    problems: list[str] = []
    others: list[str] = []
    if CONFIG_FILE not in names:
        problems.append(f"{CONFIG_FILE} is missing")
    if TOKENIZER_FILE not in names:
        found = [name for name in _OTHER_TOKENIZERS if name in names]
        problems.append(f"{TOKENIZER_FILE} is missing{_beside(found)}")
        others += found
    if SINGLE_FILE not in names and INDEX_FILE not in names:
        found = sorted(name for name in names if "/" not in name and name.endswith(_OTHER_WEIGHTS))
        reason = "; some such files may run code when they are loaded" if found else ""
        problems.append(f"it has no {SINGLE_FILE} and no {INDEX_FILE}{_beside(found)}{reason}")
        others += found
    if not problems:
        return
    do = (
        "Save it once with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY), and the same"
        " with AutoModelForCausalLM; then give that directory."
        if others
        else "Give a complete Hugging Face model."
    )
    kind = ModelUnsupported if others else ModelNotFound
    raise kind(f"{where} cannot be served as it is: {'; '.join(problems)}. {do}")


def _beside(found: list[str]) -> str:
    if not found:
        return ""
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return f" (found only {shown}, which {'is' if len(found) == 1 else 'are'} not supported)"
