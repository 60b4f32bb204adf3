"""/encode: rows of numbers as SGLang answers them, each with what is known of its input. Pure."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import msgspec
from typing_extensions import override

from nodes.gateway.admission.named_calls import check_names, prompt_names
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import unsupported
from nodes.gateway.surfaces.vectors.answers import PooledMeta, PooledRow
from nodes.gateway.surfaces.vectors.bodies import OF_EMBEDDINGS, EncodeBody
from nodes.gateway.surfaces.vectors.embeddings import check_dimensions, in_brackets, normalizes, prompted
from nodes.gateway.surfaces.vectors.form import EMBEDDING, SCORES, Computed, Form, Work, second_form
from nodes.gateway.surfaces.vectors.inputs import inputs_of
from nodes.gateway.surfaces.vectors.numbers import Row, shortened
from nodes.models.pooling import Pooling

_ENCODE = msgspec.json.Encoder().encode


class EncodeForm(Form):
    """Vectors of a model of embeddings, as at /v1/embeddings; of others what their heads say."""

    id_prefix: ClassVar[str] = "embd-"
    body = EncodeBody
    kinds = EMBEDDING | SCORES

    @override
    def read(self, body: EncodeBody, pooling: Pooling, config: GatewayConfig) -> Work:
        field, given = ("input_ids", body.input_ids) if second_form(body) else ("text", body.text)
        inputs = inputs_of(field, given or "", config)
        of_row: Callable[[Row], Row] | None = None
        if pooling.kind == "embedding":
            check_dimensions(body.dimensions, pooling, config)
            inputs = prompted(inputs, body.prompt_name, pooling)
            normalize = normalizes(body.normalize, body.dimensions, pooling)
            of_row = partial(shortened, dimensions=body.dimensions, normalize=normalize)
        else:
            _check_is_embedding(body)
        rid, num = body.rid or body.request_id, len(inputs.names)
        if isinstance(rid, list):
            check_names(rid, num)
        names = prompt_names(rid, num) if rid else ()
        return Work(inputs, partial(rows, is_alone=list(inputs.names) == [field], names=names, of_row=of_row))


def rows(
    computed: Computed,
    *,
    is_alone: bool,
    names: Sequence[str] = (),
    of_row: Callable[[Row], Row] | None = None,
) -> Iterator[bytes]:
    """One row, or a list of all. `names`: the client's of each; `of_row` makes of a row what is shown of it."""

    def encoded(index: int, row: Row, num_tokens: int) -> bytes:
        ours = computed.id if is_alone else f"{computed.id}-{index}"
        meta = PooledMeta(id=names[index] if names else ours, prompt_tokens=num_tokens)
        return _ENCODE(PooledRow(embedding=(row if of_row is None else of_row(row)).tolist(), meta_info=meta))

    each = (encoded(index, *one) for index, one in enumerate(zip(computed.rows, computed.num_tokens, strict=True)))
    return each if is_alone else in_brackets(each)


def _check_is_embedding(body: EncodeBody) -> None:
    """Raise `BadRequest` for fields that only vectors have."""
    for field in OF_EMBEDDINGS:
        if getattr(body, field) is not None:
            message = f"'{field}' is not supported by this model: it gives scores or classes, not embeddings."
            raise unsupported(message, field)
