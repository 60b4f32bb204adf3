"""Which paths have which form, and which of them a model can serve."""

from collections.abc import Mapping
from typing import Final

from nodes.gateway.config import GatewayConfig
from nodes.gateway.surfaces.vectors.bodies import AnyRerankBody, RerankBody
from nodes.gateway.surfaces.vectors.classify import ClassifyForm
from nodes.gateway.surfaces.vectors.embeddings import EmbeddingsForm, EmbedForm
from nodes.gateway.surfaces.vectors.encode import EncodeForm
from nodes.gateway.surfaces.vectors.form import Form
from nodes.gateway.surfaces.vectors.scoring import RerankForm, ScoreForm

_EMBEDDINGS, _SCORE, _RERANK, _CLASSIFY = EmbeddingsForm(), ScoreForm(), RerankForm(RerankBody), ClassifyForm()

VECTORS: Final[Mapping[str, Form]] = {
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/embed": EmbedForm(),
    "/encode": EncodeForm(),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": RerankForm(AnyRerankBody),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/classify": _CLASSIFY,
    "/v1/classify": _CLASSIFY,
}


def is_served(path: str, config: GatewayConfig) -> bool:
    """Whether this model can answer at `path`; of other paths than these, yes."""
    form, pooling = VECTORS.get(path), config.pooling
    if form is None:
        return True
    if pooling is None or pooling.kind not in form.kinds:
        return False
    is_class = pooling.kind == "classify" and pooling.num_dimensions(config.hidden_size) != 1
    return not is_class or path in ("/classify", "/v1/classify", "/encode")
