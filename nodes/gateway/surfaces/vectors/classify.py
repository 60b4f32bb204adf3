"""/classify: the class of each `input`, as at vLLM, or the numbers of each `text`, as at SGLang. Pure."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import msgspec
from typing_extensions import override

from nodes.gateway.config import GatewayConfig
from nodes.gateway.surfaces.vectors.answers import Classified, ClassifiedList
from nodes.gateway.surfaces.vectors.bodies import ClassifyBody
from nodes.gateway.surfaces.vectors.encode import rows
from nodes.gateway.surfaces.vectors.form import SCORES, Computed, Form, Work, second_form
from nodes.gateway.surfaces.vectors.inputs import inputs_of
from nodes.gateway.surfaces.vectors.numbers import Row, activated
from nodes.models.pooling import Pooling

_ENCODE = msgspec.json.Encoder().encode


class ClassifyForm(Form):
    """Both."""

    id_prefix: ClassVar[str] = "classify-"
    body = ClassifyBody
    kinds = SCORES

    @override
    def read(self, body: ClassifyBody, pooling: Pooling, config: GatewayConfig) -> Work:
        if second_form(body):
            is_alone = isinstance(body.text, str)
            inputs = inputs_of("text", body.text or "", config)
            return Work(inputs, partial(rows, is_alone=is_alone))
        inputs = inputs_of("input", body.input or "", config)
        inputs = inputs._replace(add_special_tokens=body.add_special_tokens is not False)
        activation = "softmax" if pooling.kind == "yes_no" else pooling.activation
        shown = "identity" if body.use_activation is False else activation

        def answer(computed: Computed) -> Iterator[bytes]:
            data = [_class(index, activated(row, shown), _labels(pooling)) for index, row in enumerate(computed.rows)]
            yield _ENCODE(ClassifiedList(data=data, **computed.beside))

        return Work(inputs, answer)


def _labels(pooling: Pooling) -> Sequence[str]:
    return pooling.labels or (("no", "yes") if pooling.kind == "yes_no" else ())


def _class(index: int, shares: Row, labels: Sequence[str]) -> Classified:
    best = int(shares.argmax())
    # transformers' name for a class without one.
    label = labels[best] if best < len(labels) else f"LABEL_{best}"
    return Classified(index=index, label=label, probs=shares.tolist(), num_classes=len(shares))
