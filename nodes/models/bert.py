"""BERT (Devlin et al. 2018): what most embed with, and cross-encoders for pairs of texts."""

from typing import Final

from typing_extensions import override

from nodes.models.encoder import Encoder
from nodes.models.pooling import Dense


class Bert(Encoder):
    """The head that predicts masked words is left out, and the pooler where no class follows it."""

    names = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
    model_type = "bert"
    body = "bert."

    @classmethod
    @override
    def class_head(cls, hidden: int, num_classes: int) -> tuple[Dense, ...]:
        return (
            Dense(hidden, hidden, "bert.pooler.dense.weight", "bert.pooler.dense.bias", "tanh"),
            Dense(hidden, num_classes, "classifier.weight", "classifier.bias"),
        )


ARCHITECTURE: Final = Bert
