"""Answers of the routes for vectors, as types."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from nodes.gateway.surfaces.vectors.bodies import DocumentText


class VectorUsage(Struct, frozen=True, kw_only=True):
    """How many tokens were read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of float32, little-endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Listed(Struct, frozen=True, kw_only=True):
    """What OpenAI and vLLM say beside a list."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: VectorUsage


class EmbeddingList(Listed, frozen=True, kw_only=True):
    """Answer of POST /v1/embeddings."""

    data: list[Embedding]


class Score(Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Listed, frozen=True, kw_only=True):
    """Answer of POST /score."""

    data: list[Score]


class Reranked(Struct, frozen=True, kw_only=True):
    """A document; `index` is its place in the request."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class RerankedList(Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/rerank: the best first."""

    id: str
    model: str
    results: list[Reranked]
    usage: VectorUsage


class RouterRank(Struct, frozen=True, kw_only=True):
    """A document, as SGLang's router reads it in a list of them."""

    index: int
    score: float
    document: str | UnsetType = UNSET


class Rank(Struct, frozen=True, kw_only=True):
    """One text, as text-embeddings-inference answers it."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Classified(Struct, frozen=True, kw_only=True):
    """The likeliest class of one input, and the share of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(Listed, frozen=True, kw_only=True):
    """Answer of POST /classify to `input`."""

    data: list[Classified]


class PooledMeta(Struct, frozen=True, kw_only=True):
    """What is known of an input beside its numbers."""

    id: str
    prompt_tokens: int


class PooledRow(Struct, frozen=True, kw_only=True):
    """What the model made of one `text`, as SGLang answers it; of several it is a list of these."""

    embedding: list[float]
    meta_info: PooledMeta
