"""Gateways' settings for models of each kind, and forms played without a mesh: rows are given in place of computed."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from nodes.gateway.config import GatewayConfig
from nodes.gateway.jobs.validation import Job
from nodes.gateway.surfaces.vectors.form import Computed, FormReader
from nodes.gateway.surfaces.vectors.routes import VECTORS
from nodes.models.pooling import Dense, Pooling

HIDDEN = 8
EMBEDDING = Pooling(pool="mean", prompts={"query": "q: ", "document": "", "web": "w: "}, max_length=50)
SCORE = Pooling(pool="cls", kind="score", dense=(Dense(HIDDEN, 1, "w"),), activation="sigmoid")
CLASSES = Pooling(
    pool="last", kind="classify", dense=(Dense(HIDDEN, 3, "w"),), labels=("a", "b", "c"), activation="softmax"
)
YES_NO = Pooling(pool="last", kind="yes_no", dense=(Dense(HIDDEN, 2, "w"),), activation="softmax")


def config_of(pooling: Pooling | None, **fields: Any) -> GatewayConfig:
    given = {"model_name": "m", "context_length": 100, "vocab_size": 300, "max_inputs_per_call": 5} | fields
    return GatewayConfig(**given, pooling=pooling, hidden_size=HIDDEN)


def job_of(path: str, pooling: Pooling | None, body: Any, **fields: Any) -> Job:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return FormReader(VECTORS[path], config_of(pooling, **fields)).job(data, "id-1")


def answer_of(path: str, pooling: Pooling, rows: Callable[[str], Sequence[float]] | Any, **body: Any) -> Any:
    """The answer, if each input becomes `rows(its text)` and has as many tokens as characters."""
    work = job_of(path, pooling, body).own
    texts = work.inputs.texts or ["".join(map(chr, ids)) for ids in work.inputs.token_ids]
    texts = [*map(str.__add__, texts, work.inputs.seconds)] if work.inputs.seconds is not None else texts
    computed = Computed(
        id="id-1",
        created=7,
        model="m",
        rows=[np.array(rows(text), np.float32) for text in texts],
        num_tokens=[*map(len, texts)],
    )
    return json.loads(b"".join(work.answer(computed)))
