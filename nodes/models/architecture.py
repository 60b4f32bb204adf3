"""The base of all models: a list of parts, and the order in which operations compute them.

An architecture is a subclass of `Decoder` or `Encoder`, in a file that names it as `ARCHITECTURE`.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from nodes.models.config_fields import ConfigFields
from nodes.models.ops import Ops, Value
from nodes.models.parts import Embedding, Parameter, own_parameters, parts_of
from nodes.models.pooling import Dense
from nodes.models.spec import ModelSpec


class Wrapper(NamedTuple):
    """A model of text and images with this architecture as its text part, whose `text_config` may leave out whatever
    has one of the `defaults` in transformers.
    """

    name: str
    model_type: str
    defaults: dict[str, int]


class Architecture(ABC):
    """One model: its parts, and how they are computed. `names` are its `architectures` in a `config.json`.

    What transformers calls the network of a decoder without a head of words begins with `family`: `LlamaModel`,
    `LlamaForSequenceClassification`.
    """

    names: ClassVar[tuple[str, ...]] = ()
    family: ClassVar[str] = ""
    model_type: ClassVar[str] = ""
    wrapper: ClassVar[Wrapper | None] = None

    embedding: Embedding
    layers: list[Any]

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def describe(cls, config: ConfigFields) -> dict[str, Any]:
        """The fields of `ModelSpec` that depend on the architecture. Raises ModelDamaged or ModelUnsupported."""
        ...

    @classmethod
    @abstractmethod
    def class_head(cls, hidden: int, num_classes: int) -> tuple[Dense, ...]:
        """What makes logits of classes of one state; tensors have the names that transformers gives them."""
        ...

    @property
    @abstractmethod
    def parts(self) -> list[object]:
        """All parts, in the order in which their tensors are loaded; the embedding is the first."""
        ...

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that is read from a checkpoint, by name, in the order in which they are loaded."""
        found = {parameter.name: parameter for parameter in parts_of((Parameter,), self.parts)}
        pooling = self.spec.pooling
        behind = [one for dense in (pooling.dense if pooling else ()) for one in own_parameters(dense)]
        return found | {one.name: one for one in behind if one.name not in found}

    @abstractmethod
    def run(self, ops: Ops[Value]) -> Value:
        """Logits of the sampled rows of the step that `ops` holds; KV of all rows is written to the pages."""
        ...
