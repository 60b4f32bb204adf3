"""XLM-RoBERTa (Conneau et al. 2019): multilingual embeddings, and most rerankers."""

from typing import Final

from nodes.models.roberta import Roberta


class XlmRoberta(Roberta):
    """RoBERTa with another vocabulary."""

    names = ("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification")
    model_type = "xlm-roberta"


ARCHITECTURE: Final = XlmRoberta
