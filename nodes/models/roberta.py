"""RoBERTa (Liu et al. 2019): BERT whose positions are counted from behind the padding's id."""

from typing import Final

from typing_extensions import override

from nodes.models.config_fields import ConfigFields
from nodes.models.encoder import Encoder
from nodes.models.pooling import Dense


class Roberta(Encoder):
    """The head that predicts masked words is left out."""

    names = ("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification")
    model_type = "roberta"
    body = "roberta."

    @classmethod
    @override
    def _first_position(cls, config: ConfigFields) -> int:
        return config.integer("pad_token_id", 1, least=0) + 1

    @classmethod
    @override
    def class_head(cls, hidden: int, num_classes: int) -> tuple[Dense, ...]:
        return (
            Dense(hidden, hidden, "classifier.dense.weight", "classifier.dense.bias", "tanh"),
            Dense(hidden, num_classes, "classifier.out_proj.weight", "classifier.out_proj.bias"),
        )


ARCHITECTURE: Final = Roberta
