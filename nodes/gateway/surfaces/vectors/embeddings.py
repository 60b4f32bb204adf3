"""/v1/embeddings, as at OpenAI and vLLM, and /embed, as at text-embeddings-inference. Pure."""

from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, NamedTuple, get_args

import msgspec
from typing_extensions import override

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import invalid
from nodes.gateway.surfaces.vectors.answers import Embedding
from nodes.gateway.surfaces.vectors.bodies import EmbedBody, EmbeddingsBody, InputType
from nodes.gateway.surfaces.vectors.form import (
    CUT_AS_AT_TEI,
    DOCUMENT,
    EMBEDDING,
    QUERY,
    Computed,
    Form,
    Work,
    prompt_of,
)
from nodes.gateway.surfaces.vectors.inputs import Inputs, inputs_of
from nodes.gateway.surfaces.vectors.numbers import Row, bytes_of, shortened
from nodes.models.pooling import Pooling

_ENCODE = msgspec.json.Encoder().encode


class _Shape(NamedTuple):
    """What is shown of each row."""

    dimensions: int | None
    normalize: bool
    base64: bool = False

    def of(self, row: Row) -> list[float] | str:
        row = shortened(row, self.dimensions, normalize=self.normalize)
        return b64encode(bytes_of(row)).decode() if self.base64 else row.tolist()


class EmbeddingsForm(Form):
    """OpenAI's."""

    id_prefix: ClassVar[str] = "embd-"
    body = EmbeddingsBody
    kinds = EMBEDDING

    @override
    def read(self, body: EmbeddingsBody, pooling: Pooling, config: GatewayConfig) -> Work:
        check_dimensions(body.dimensions, pooling, config)
        inputs = inputs_of("input", body.input, config)
        if body.input_type is None:
            inputs = prompted(inputs, body.prompt_name, pooling)
        else:
            inputs = _of_type(inputs, body.input_type, pooling)
        inputs = inputs._replace(add_special_tokens=body.add_special_tokens is not False)
        wanted = body.use_activation if body.normalize is None else body.normalize
        normalize = normalizes(wanted, body.dimensions, pooling)
        shape = _Shape(body.dimensions, normalize, body.encoding_format == "base64")
        return Work(inputs, partial(_listed, shape=shape))


class EmbedForm(Form):
    """text-embeddings-inference's: vectors of length one unless told otherwise."""

    id_prefix: ClassVar[str] = "embd-"
    body = EmbedBody
    kinds = EMBEDDING

    @override
    def read(self, body: EmbedBody, pooling: Pooling, config: GatewayConfig) -> Work:
        check_dimensions(body.dimensions, pooling, config)
        inputs = prompted(inputs_of("inputs", body.inputs, config), body.prompt_name, pooling)
        shape = _Shape(body.dimensions, body.normalize is not False)
        return Work(inputs, partial(_bare, shape=shape), CUT_AS_AT_TEI)


def normalizes(wanted: bool | None, dimensions: int | None, pooling: Pooling) -> bool:
    """Whether a row is shown with length one; None: as the model's folder says."""
    # A part of a vector of length one is shorter.
    return pooling.normalize or dimensions is not None if wanted is None else wanted


def in_brackets(items: Iterator[bytes]) -> Iterator[bytes]:
    """A JSON list, an item in each piece."""
    before = b"["
    for item in items:
        yield before + item
        before = b","
    yield b"]"


def _bare(computed: Computed, shape: _Shape) -> Iterator[bytes]:
    return in_brackets(_ENCODE(shape.of(row)) for row in computed.rows)


def _listed(computed: Computed, shape: _Shape) -> Iterator[bytes]:
    # By hand around the rows, which 2,048 inputs make megabytes of: others have their turns between two of them.
    head = {"id": computed.id, "object": "list", "created": computed.created, "model": computed.model}
    yield _ENCODE(head)[:-1] + b',"data":'
    yield from in_brackets(
        _ENCODE(Embedding(index=index, embedding=shape.of(row))) for index, row in enumerate(computed.rows)
    )
    yield b',"usage":' + _ENCODE(computed.usage) + b"}"


def check_dimensions(wanted: int | None, pooling: Pooling, config: GatewayConfig) -> None:
    """Raise `BadRequest` for more than the model has."""
    most = pooling.num_dimensions(config.hidden_size)
    if wanted is not None and wanted > most:
        raise invalid(f"'dimensions' is {wanted}, but this model's vectors have {most}.", "dimensions")


def prompted(inputs: Inputs, name: str | None, pooling: Pooling) -> Inputs:
    """Texts behind the model's prompt of this name, or its default one. Raises `BadRequest`."""
    if name is not None and name not in pooling.prompts:
        known = ", ".join(map(repr, sorted(pooling.prompts))) or "none at all"
        raise invalid(f"'prompt_name' is '{name[:200]}', but this model's prompts are {known}.", "prompt_name")
    if name is not None and inputs.token_ids:
        raise invalid("'prompt_name' needs inputs of text: a prompt and ids cannot be joined.", "prompt_name")
    return _behind(inputs, prompt_of(pooling) if name is None else pooling.prompts[name])


def prompts_of_types(pooling: Pooling) -> dict[str, str]:
    """By `input_type`: the prompt that it chooses, empty for none. What a model with prompts of its own cannot tell
    from others is left out; to one without, all texts are alike.
    """
    alike = dict.fromkeys(("query", "search_query"), QUERY)
    alike |= dict.fromkeys(("document", "passage", "search_document"), DOCUMENT)
    return {
        name: prompt_of(pooling, (name, *alike.get(name, ())))
        for name in get_args(InputType)
        if name in alike or name in pooling.prompts or not pooling.prompts
    }


def _of_type(inputs: Inputs, name: str, pooling: Pooling) -> Inputs:
    prompts = prompts_of_types(pooling)
    if name not in prompts:
        known = ", ".join(map(repr, sorted(pooling.prompts)))
        raise invalid(f"'input_type' is '{name}', but this model's prompts are {known}.", "input_type")
    if prompts[name] and inputs.token_ids:
        message = "'input_type' needs inputs of text with this model: a prompt and ids cannot be joined."
        raise invalid(message, "input_type")
    return _behind(inputs, prompts[name])


def _behind(inputs: Inputs, prompt: str) -> Inputs:
    return inputs._replace(texts=[prompt + text for text in inputs.texts]) if prompt else inputs
