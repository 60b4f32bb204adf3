"""Networks without a head of words, by what `config.json` calls them: what they make of the last position's state.

    LlamaModel                        nothing: how it pools is said elsewhere
    LlamaForSequenceClassification    logits of its labels, or one score: `score.weight`
    BertForSequenceClassification     the same, of the first position: `bert.pooler.dense`, tanh, `classifier`
    Qwen2ForRewardModel               one score: `score.0`, relu, `score.2`

Pure. Used by `text_model.py` and `directory.py`.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar, cast

from nodes.models.architecture import Architecture
from nodes.models.config_fields import ConfigFields
from nodes.models.encoder import Encoder
from nodes.models.pooling import Activation, Dense, Pooling

Named = TypeVar("Named", bound=str)
_PLAIN: Final = "Model"
_CLASSES: Final = "ForSequenceClassification"
_REWARD: Final = "ForRewardModel"
_NUM_LABELS: Final = 2
"""What transformers takes, and does not write, if a file says nothing."""
_MAX_LABELS: Final = 100_000
"""Published classifiers have up to thousands; a wrong number must not fill the memory with names."""
_ACTIVATIONS: Final[dict[str, Activation]] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_OF_PROBLEM: Final[dict[str, Activation]] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""As `TextClassificationPipeline` of transformers, whose problem types these are."""


def vector_architectures(family: str) -> tuple[str, ...]:
    """What the networks of a `Decoder.family` are called that have no head of words."""
    return tuple(family + form for form in (_PLAIN, _CLASSES, _REWARD)) if family else ()


def has_no_head(architecture: str) -> bool:
    """Whether an architecture is called as one of those."""
    return architecture.endswith((_PLAIN, _CLASSES, _REWARD))


def head_pooling(
    architecture: str, config: ConfigFields, hidden_size: int, network: type[Architecture]
) -> Pooling | None:
    """What the head of an architecture makes of the last position, an encoder's of the first; None: it has none.

    Raises ModelDamaged or ModelUnsupported for what `config` says of it.
    """
    if architecture.endswith(_REWARD):
        hidden = Dense(hidden_size, hidden_size, "score.0.weight", "score.0.bias", activation="relu")
        return Pooling(
            pool="last", kind="score", dense=(hidden, Dense(hidden_size, 1, "score.2.weight", "score.2.bias"))
        )
    if not architecture.endswith(_CLASSES):
        return None
    labels = read_labels(config)
    return Pooling(
        pool="cls" if issubclass(network, Encoder) else "last",
        kind="score" if len(labels) == 1 else "classify",
        dense=network.class_head(hidden_size, len(labels)),
        labels=labels,
        activation=read_activation(config, len(labels)),
    )


def read_labels(config: ConfigFields) -> tuple[str, ...]:
    """The names of a classifier's logits, in order: `id2label`, or `LABEL_0` and so on. Raises ModelDamaged."""
    named: Any = config.value("id2label")
    if named is None:
        count = config.integer("num_labels", _NUM_LABELS, most=_MAX_LABELS)
        return tuple(f"LABEL_{number}" for number in range(count))
    given = cast("dict[str, Any]", named) if isinstance(named, dict) else {}
    labels = tuple(given.get(str(number)) for number in range(len(given)))
    if not labels or not all(isinstance(label, str) for label in labels):
        raise config.damaged("id2label", "does not name its labels by the numbers from 0 on")
    return cast("tuple[str, ...]", labels)


def read_activation(config: ConfigFields, num_labels: int) -> Activation:
    """What makes logits of a classifier's `config.json` what answers show. Raises ModelUnsupported, ModelDamaged.

    What sentence-transformers wrote there goes first (since its release 4, and before), then the type of problem; a
    score is squeezed by a sigmoid, classes by a softmax.
    """
    written: Any = config.value("sentence_transformers")
    if isinstance(written, dict) and cast("dict[str, Any]", written).get("activation_fn") is not None:
        return activation_called(config.part(cast("dict[str, Any]", written)), "activation_fn")
    if config.value("sbert_ce_default_activation_function") is not None:
        return activation_called(config, "sbert_ce_default_activation_function")
    problem: Any = config.value("problem_type")
    if problem is not None:
        config.require("problem_type", *_OF_PROBLEM)
        return _OF_PROBLEM[problem]
    return "sigmoid" if num_labels == 1 else "softmax"


def activation_called(config: ConfigFields, key: str) -> Activation:
    """The activation of scores that a field names by its class in torch. Raises ModelUnsupported."""
    return class_of_torch(config, key, _ACTIVATIONS)


def class_of_torch(config: ConfigFields, key: str, known: Mapping[str, Named]) -> Named:
    """What a class of torch stands for that a field names with its module. Raises ModelUnsupported."""
    name: Any = config.value(key)
    # Other modules are code of the folder's own, which is never run.
    last = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("torch.") else ""
    if last not in known:
        raise config.unsupported(key, f"is {name!r}; supported are {', '.join(known)} of torch")
    return known[last]
