"""What a form is: the body and the answer of a route for vectors. All of them share one endpoint (`endpoint.py`). Pure.

body -> `Work`: inputs, and how to answer -> a `Job` without outputs -> rows of numbers -> the answer's pieces
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from msgspec import Struct

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import BadRequest, invalid
from nodes.gateway.fields.body_reader import BodyReader
from nodes.gateway.fields.cache_scope import scope_of
from nodes.gateway.jobs.validation import Job, check_model
from nodes.gateway.surfaces.vectors.answers import VectorUsage
from nodes.gateway.surfaces.vectors.bodies import (
    EITHER,
    EXCLUSIVE,
    NEUTRAL,
    AnyRerankBody,
    EmbedBody,
    EmbeddingsBody,
    VectorBody,
)
from nodes.gateway.surfaces.vectors.inputs import Inputs
from nodes.gateway.surfaces.vectors.numbers import Row
from nodes.models.pooling import Pooling
from nodes.protocol import Prepare
from nodes.request import VECTORS, Sampling, StopRules

EMBEDDING: Final = frozenset({"embedding"})
SCORES: Final = frozenset({"classify", "score", "yes_no"})


class Computed(NamedTuple):
    """All that a call's inputs became: a row and a number of tokens for each."""

    id: str
    created: int
    model: str
    rows: Sequence[Row]
    num_tokens: Sequence[int]

    @property
    def usage(self) -> VectorUsage:
        total = sum(self.num_tokens)
        return VectorUsage(prompt_tokens=total, total_tokens=total)

    @property
    def beside(self) -> dict[str, Any]:
        """The fields of `Listed` that have no default."""
        return {"id": self.id, "created": self.created, "model": self.model, "usage": self.usage}


Answer = Callable[[Computed], Iterator[bytes]]
"""JSON, in pieces of at most one row: a long answer is made beside others."""


class Work(NamedTuple):
    """What one body asks for; `Job.own` of these routes. `cut`: what else to send, so that inputs are cut to fit."""

    inputs: Inputs
    answer: Answer
    cut: str = "'truncate_prompt_tokens': -1"


CUT_AS_AT_TEI: Final = "'truncate': true"
"""`Work.cut` where a body is that of text-embeddings-inference."""


class Form(Protocol):
    """Of one route. `kinds` of poolings can serve it."""

    id_prefix: ClassVar[str]
    body: type[Struct]
    kinds: ClassVar[frozenset[str]]

    def read(self, body: Any, pooling: Pooling, config: GatewayConfig) -> Work:
        """Raises `BadRequest`."""
        ...


class FormReader:
    """Makes jobs of one form's bodies, for one gateway."""

    def __init__(self, form: Form, config: GatewayConfig) -> None:
        self._form = form
        self._config = config
        self._reader = BodyReader(form.body, neutral=NEUTRAL)

    def job(self, data: bytes, request_id: str) -> Job[Work]:
        """Raises `ApiError`."""
        decoded = self._reader.decode(data)
        body: VectorBody = decoded.body
        config = self._config
        check_model(body.model, config)
        _check_exclusive(body)
        pooling = _pooling_of(config, self._form)
        work = self._form.read(body, pooling, config)
        truncate_to, keeps_first = _truncation(body, config)
        return Job(
            prompt_param=work.inputs.names[0].partition(".")[0],
            default_tokens=1,
            prepare=Prepare(
                request_id=request_id,
                extra_key=scope_of(body.cache_salt, body.extra_key),
                truncate_to=truncate_to,
                truncate_end=keeps_first,
                asks=[VECTORS],
            ),
            sampling=Sampling(),
            seed=0,
            stop=StopRules(max_tokens=1),
            n=1,
            stream=False,
            include_usage=False,
            continuous_usage=False,
            max_tokens_param="",
            priority=body.priority or 0,
            skip_special_tokens=True,
            unknown_fields=decoded.unknown_fields,
            client_id=body.request_id or (body.rid if isinstance(body.rid, str) else ""),
            own=work,
            kind=pooling.pool,
        )


def second_form(body: Struct, needed: int = 1) -> bool:
    """Whether a body with two forms is of the second. Raises `BadRequest` for one of both, of none, or of a half.

    `needed`: how many fields each form cannot do without.
    """
    forms = EITHER[type(body).__name__]
    given = [[name for name in names if getattr(body, name) is not None] for names in forms]
    if given[0] and given[1]:
        raise invalid(f"'{given[1][0]}' cannot be used together with '{given[0][0]}'.", given[1][0])
    is_second = bool(given[1])
    missing = [name for name in forms[is_second][:needed] if name not in given[is_second]]
    if missing:
        other = f" Give it, or '{forms[not is_second][0]}'." if not given[is_second] else ""
        message = f"Missing required parameter: '{missing[0]}'.{other}"
        raise BadRequest(message, param=missing[0], code="missing_required_parameter")
    return is_second


QUERY: Final = ("query", "search_query")
DOCUMENT: Final = ("document", "passage", "corpus", "search_document")
"""Names of prompts that are for one thing. `encode_query` and `encode_document` of sentence-transformers know the first
one of the first, the first three of the second; models trained with the others name them so."""


def prompt_of(pooling: Pooling, names: Sequence[str] = ()) -> str:
    """The text that stands before an input: the first prompt of these names, if there is one; without names the default
    one. As in sentence-transformers that is not taken for a text of which is said what it is.
    """
    return next((pooling.prompts[name] for name in names or [pooling.default_prompt] if name in pooling.prompts), "")


def _pooling_of(config: GatewayConfig, form: Form) -> Pooling:
    pooling = config.pooling
    if pooling is None:
        message = (
            f"The model '{config.model_name}' gives no vectors: its folder has no 1_Pooling/config.json. Serve one "
            "that has, or say how states are pooled: `meshctl up --pooling last` (or mean, cls), in a program "
            '`Engine(…, pooling="last")`.'
        )
        raise BadRequest(message, code="no_pooling")
    if pooling.kind not in form.kinds:
        message = f"The model '{config.model_name}' gives {config.gives}."
        raise BadRequest(message, code="unsupported_model")
    return pooling


def _check_exclusive(body: VectorBody) -> None:
    for one, other in EXCLUSIVE.get(type(body).__name__, ()):
        if getattr(body, one) is not None and getattr(body, other) is not None:
            raise invalid(f"'{other}' cannot be used together with '{one}'.", other)


def _truncation(body: VectorBody, config: GatewayConfig) -> tuple[int, bool]:
    """`Prepare.truncate_to` and `truncate_end`. Raises `BadRequest`."""
    wanted, side = body.truncate_prompt_tokens, body.truncation_side
    truncate = body.truncate if isinstance(body, EmbeddingsBody | EmbedBody | AnyRerankBody) else None
    # The same by other names: the direction is the side from which tokens go.
    if wanted is None and truncate not in (None, False, "NONE"):
        wanted = -1
    if truncate in ("START", "END"):
        if side is not None:
            message = f"'truncation_side' cannot be used together with 'truncate': '{truncate}', which names a side."
            raise invalid(message, "truncation_side")
        side = "left" if truncate == "START" else "right"
    if isinstance(body, EmbedBody | AnyRerankBody) and body.truncation_direction is not None:
        side = "left" if body.truncation_direction.lower() == "left" else "right"
    if wanted == 0:
        raise invalid("'truncate_prompt_tokens' must be at least 1, or -1 for what fits.", "truncate_prompt_tokens")
    if wanted is None:
        return 0, False
    most = config.longest_input
    return most if wanted < 0 else min(wanted, most), side != "left"
