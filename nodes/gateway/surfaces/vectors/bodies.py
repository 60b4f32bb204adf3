"""Bodies of the routes for vectors, as types, and the fields that they know and do not serve.

A route that has two forms has the fields of both: which form a body is of follows from the fields that it has.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from nodes.gateway.fields.cache_scope import CacheSalt
from nodes.gateway.fields.truncation import TruncationFields
from nodes.gateway.request_names import MAX_CHARS
from nodes.request import TokenId

Input = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""A text, texts, token ids, or lists of token ids."""
Texts = str | Annotated[list[str], Meta(min_length=1)]
Dimensions = Annotated[int, Meta(ge=1, lt=2**31)]
Direction = Literal["left", "right", "Left", "Right"]
InputType = Literal["query", "passage", "document", "search_query", "search_document", "classification", "clustering"]
"""What a text is for, in the words of NIM, Voyage and Cohere."""
_Name = Annotated[str, Meta(max_length=MAX_CHARS)]
_Most = Annotated[int, Meta(ge=0, lt=2**31)]
_MAX_INSTRUCT_CHARS: Final = 4096
"""It stands before each document of a call, and says what a sentence or two can."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    # Of routes that generate.
    "n": (1,),
    "stream": (False,),
    "messages": (),
    # Other forms of numbers than float32, which base64 has little-endian.
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "output_dimension": (),
    "embedding_types": (["float"],),
    # A document is text, all of it: what would be cut by a field of its own is cut by `truncate_prompt_tokens`.
    "rank_fields": (["text"],),
    "max_tokens_per_doc": (0,),
    "max_tokens_per_query": (0,),
    "max_chunks_per_doc": (),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": (),
    "chat_template": (),
    "image_data": ([],),
    "lora_path": (),
    # SGLang's scores of a model that generates: logprobs of some tokens after a prompt.
    "label_token_ids": (),
    # At /v1/embeddings they are served; elsewhere the route or its own fields say it.
    "input_type": (),
    "truncate": (False, "NONE"),
    # Words of Jina's, Voyage's, Cohere's and NIM's for what has another name here, or what no model here does.
    "task": (),
    "prompt": (),
    "instruction": (),
    "truncation": (False,),
    "normalized": (),
    "embedding_type": ("float",),
    "output_dtype": ("float",),
    "late_chunking": (False,),
    "return_multivector": (False,),
    "return_embeddings": (False,),
    "images": ([],),
    "modality": ("text", ["text"]),
    "max_tokens": (),
    # vLLM's names for `use_activation` before it had this one.
    "activation": (True,),
    "softmax": (True,),
}
"""By field: the values that change nothing. `null` is one of them for every field."""


class VectorBody(TruncationFields, frozen=True, kw_only=True):
    """What all of them have in common. `truncation_side` is `right` if none is given: the first tokens are kept."""

    model: str | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    request_id: _Name | None = None
    rid: _Name | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None


class EmbeddingsBody(VectorBody, frozen=True, kw_only=True):
    """POST /v1/embeddings. `use_activation` is vLLM's name for `normalize`. `input_type` chooses one of the model's
    prompts. `truncate` names the side that tokens of what is too long are taken from, as at NIM; true is `END`.
    """

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    add_special_tokens: bool | None = None


class EmbedBody(VectorBody, frozen=True, kw_only=True):
    """POST /embed, as at text-embeddings-inference. With `truncate` what is too long is cut."""

    inputs: Input
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class EncodeBody(VectorBody, frozen=True, kw_only=True):
    """POST /encode, as at SGLang: `text` or `input_ids`; `rid` is one name, or a list of one for each input. The fields
    behind them are those of /v1/embeddings.
    """

    text: Texts | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    rid: _Name | list[_Name] | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - lists only here
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


OF_EMBEDDINGS: Final = ("dimensions", "normalize", "prompt_name")
"""What can be said of the embeddings of an `EncodeBody`, and not of scores and classes."""


class ScoredBody(VectorBody, frozen=True, kw_only=True):
    """What scores and ranks have in common. `use_activation` false: scores as the model has them. `instruct` is for
    models whose template has a place for an instruction.
    """

    use_activation: bool | None = None
    instruct: Annotated[str, Meta(min_length=1, max_length=_MAX_INSTRUCT_CHARS)] | None = None


class ScoreBody(ScoredBody, frozen=True, kw_only=True):
    """POST /score: `text_1` and `text_2`, or `queries` and `documents`. One first text goes with all second ones."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class DocumentText(Struct, frozen=True, kw_only=True):
    """A document, as it is sent and answered."""

    text: str


Documents = Annotated[list[str | DocumentText], Meta(min_length=1)]


class RerankBody(ScoredBody, frozen=True, kw_only=True):
    """POST /v1/rerank, as at Jina and Cohere. `top_n` 0: all. Documents are answered unless `return_documents` is
    false. A body that names a `rid`, even null, is that of SGLang's router, and is answered as it reads answers.
    """

    query: str
    documents: Documents
    rid: _Name | UnsetType | None = UNSET  # pyright: ignore[reportIncompatibleVariableOverride] - only here
    top_n: _Most | None = None
    top_k: _Most | None = None
    return_documents: bool | None = None


class AnyRerankBody(ScoredBody, frozen=True, kw_only=True):
    """POST /rerank: as /v1/rerank with `documents`, as at text-embeddings-inference with `texts`."""

    query: str
    documents: Documents | None = None
    top_n: _Most | None = None
    top_k: _Most | None = None
    return_documents: bool | None = None
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None


class ClassifyBody(VectorBody, frozen=True, kw_only=True):
    """POST /classify: `input` as at vLLM, or `text` as at SGLang."""

    input: Input | None = None
    text: Texts | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None


EITHER: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "EncodeBody": (("text", "prompt_name"), ("input_ids",)),
    "ScoreBody": (("text_1", "text_2"), ("queries", "documents")),
    "AnyRerankBody": (
        (
            "documents",
            "top_n",
            "top_k",
            "return_documents",
            "use_activation",
            "truncate_prompt_tokens",
            "truncation_side",
        ),
        ("texts", "raw_scores", "return_text", "truncate", "truncation_direction"),
    ),
    "ClassifyBody": (("input", "use_activation", "add_special_tokens"), ("text",)),
}
"""Of bodies with two forms: the fields that only one of them has; the first ones of each are what it needs."""

EXCLUSIVE: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "EmbeddingsBody": (("prompt_name", "input_type"), ("normalize", "use_activation")),
    "EmbedBody": (("truncation_side", "truncation_direction"),),
    "RerankBody": (("top_n", "top_k"),),
    "AnyRerankBody": (("top_n", "top_k"),),
}
"""Of each body, two names of one thing: with both given, one of them would do nothing."""
