"""/score and /rerank: how well texts go together. Pure.

A model of embeddings embeds each text by itself, and the score of a pair is a cosine; others read both texts at once.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
from msgspec import UNSET
from typing_extensions import override

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest, invalid, unsupported
from nodes.gateway.surfaces.vectors.answers import Rank, Reranked, RerankedList, RouterRank, Score, ScoreList
from nodes.gateway.surfaces.vectors.bodies import AnyRerankBody, DocumentText, RerankBody, ScoreBody, ScoredBody
from nodes.gateway.surfaces.vectors.form import (
    CUT_AS_AT_TEI,
    DOCUMENT,
    EMBEDDING,
    QUERY,
    SCORES,
    Computed,
    Form,
    Work,
    prompt_of,
    second_form,
)
from nodes.gateway.surfaces.vectors.inputs import Inputs, texts_of
from nodes.gateway.surfaces.vectors.numbers import Row, activated, cosine
from nodes.models.pooling import Pooling

INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own, if a request brings none."""
_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

_ENCODE = msgspec.json.Encoder().encode


class _Pairs(NamedTuple):
    """Texts that are compared: each second one with its first one, or with the only one."""

    first_names: Sequence[str]
    firsts: Sequence[str]
    names: Sequence[str]
    seconds: Sequence[str]

    def inputs(self, body: ScoredBody, pooling: Pooling, config: GatewayConfig) -> Inputs:
        """Raises `BadRequest`."""
        instruct: str | None = body.instruct
        if instruct is not None and pooling.kind != "yes_no":
            message = "'instruct' is not supported by this model: its template has no place for it."
            raise unsupported(message, "instruct")
        if pooling.kind == "embedding":
            before, after = prompt_of(pooling, QUERY), prompt_of(pooling, DOCUMENT)
            texts = [*(before + text for text in self.firsts), *(after + text for text in self.seconds)]
            return Inputs([*self.first_names, *self.names], texts)
        firsts = self.firsts if len(self.firsts) > 1 else [*self.firsts] * len(self.seconds)
        # A query is read again with each of its documents.
        if sum(map(len, firsts)) + sum(map(len, self.seconds)) > config.max_body_bytes:
            message = f"All pairs together have more than {config.max_body_bytes} characters. Send fewer in one call."
            raise invalid(message, self.names[0].partition(".")[0])
        if pooling.kind != "yes_no":
            return Inputs(self.names, firsts, self.seconds)
        instruct = instruct or prompt_of(pooling) or INSTRUCT
        asked = [f"{_BEFORE}<Instruct>: {instruct}\n<Query>: {text}\n<Document>:" for text in firsts]
        # The space goes with the document, as this tokenizer splits it: ids are those of the whole text.
        documents = [" " + text for text in self.seconds]
        return Inputs(self.names, asked, documents, add_special_tokens=False, after=_AFTER)

    def scores(self, rows: Sequence[Row], pooling: Pooling, *, is_raw: bool) -> list[float]:
        if pooling.kind != "embedding":
            return [_score(row, pooling, is_raw=is_raw) for row in rows]
        num = len(self.firsts)
        firsts = rows[:num] if num > 1 else [rows[0]] * len(self.seconds)
        return [cosine(one, other) for one, other in zip(firsts, rows[num:], strict=True)]


class ScoreForm(Form):
    """vLLM's."""

    id_prefix: ClassVar[str] = "score-"
    body = ScoreBody
    kinds = EMBEDDING | SCORES

    @override
    def read(self, body: ScoreBody, pooling: Pooling, config: GatewayConfig) -> Work:
        check_scores(pooling, config)
        fields = ("queries", "documents") if second_form(body, needed=2) else ("text_1", "text_2")
        first, second = (getattr(body, field) for field in fields)
        pairs = _Pairs(*texts_of(fields[0], first, config), *texts_of(fields[1], second, config))
        if len(pairs.firsts) not in (1, len(pairs.seconds)):
            message = (
                f"'{fields[0]}' has {len(pairs.firsts)} texts and '{fields[1]}' {len(pairs.seconds)}. Give one, or as "
                "many as there are."
            )
            raise invalid(message, fields[0])
        is_raw = body.use_activation is False

        def answer(computed: Computed) -> Iterator[bytes]:
            scores = pairs.scores(computed.rows, pooling, is_raw=is_raw)
            data = [Score(index=index, score=score) for index, score in enumerate(scores)]
            yield _ENCODE(ScoreList(data=data, **computed.beside))

        return Work(pairs.inputs(body, pooling, config), answer)


class RerankForm(Form):
    """Jina's and Cohere's, and, where the body has `texts`, that of text-embeddings-inference."""

    id_prefix: ClassVar[str] = "rerank-"
    kinds = EMBEDDING | SCORES

    def __init__(self, body: type[RerankBody | AnyRerankBody]) -> None:
        # What a body is decoded as is the only difference between the routes.
        self.body = body

    @override
    def read(self, body: RerankBody | AnyRerankBody, pooling: Pooling, config: GatewayConfig) -> Work:
        check_scores(pooling, config)
        is_other = isinstance(body, AnyRerankBody) and second_form(body)
        field, given = ("texts", getattr(body, "texts", None)) if is_other else ("documents", body.documents)
        texts = [one if isinstance(one, str) else one.text for one in given or ()]
        pairs = _Pairs(*texts_of("query", body.query, config), *texts_of(field, texts, config))
        is_raw = (bool(body.raw_scores) if isinstance(body, AnyRerankBody) else False) or body.use_activation is False

        def answer(computed: Computed) -> Iterator[bytes]:
            scores = pairs.scores(computed.rows, pooling, is_raw=is_raw)
            # Of equal ones the first: the order is the same for every call.
            ranked = sorted(enumerate(scores), key=lambda one: -one[1])
            if is_other:
                yield _ENCODE(_ranks(body, texts, ranked))
            else:
                results = _results(body, texts, ranked)
                yield _ENCODE(_of_router(results) if _is_of_router(body) else _listed(results, computed))

        work = Work(pairs.inputs(body, pooling, config), answer)
        return work._replace(cut=CUT_AS_AT_TEI) if is_other else work


def check_scores(pooling: Pooling, config: GatewayConfig) -> None:
    """Raise `BadRequest` for a model of which a pair would get several scores."""
    num = pooling.num_dimensions(config.hidden_size)
    if pooling.kind == "classify" and num != 1:
        message = f"The model '{config.model_name}' gives {num} classes, not one score: ask /classify."
        raise BadRequest(message, code="unsupported_model")


def _score(row: Row, pooling: Pooling, *, is_raw: bool) -> float:
    if pooling.kind == "yes_no":
        no, yes = row.tolist()
        return yes - no if is_raw else float(activated(row, "softmax")[1])
    return float(row[0] if is_raw else activated(row, pooling.activation)[0])


def _ranks(body: Any, texts: Sequence[str], ranked: Sequence[tuple[int, float]]) -> list[Rank]:
    shown = bool(body.return_text)
    return [Rank(index=index, score=score, text=texts[index] if shown else UNSET) for index, score in ranked]


def _results(
    body: RerankBody | AnyRerankBody, texts: Sequence[str], ranked: Sequence[tuple[int, float]]
) -> list[Reranked]:
    shown = body.return_documents is not False
    most = body.top_n or body.top_k or len(ranked)
    return [
        Reranked(index=index, relevance_score=score, document=DocumentText(text=texts[index]) if shown else UNSET)
        for index, score in ranked[:most]
    ]


def _is_of_router(body: RerankBody | AnyRerankBody) -> bool:
    return isinstance(body, RerankBody) and body.rid is not UNSET


def _of_router(results: Sequence[Reranked]) -> list[RouterRank]:
    return [
        RouterRank(
            index=one.index,
            score=one.relevance_score,
            document=UNSET if one.document is UNSET else one.document.text,
        )
        for one in results
    ]


def _listed(results: list[Reranked], computed: Computed) -> RerankedList:
    return RerankedList(id=computed.id, model=computed.model, results=results, usage=computed.usage)
