"""`Engine.score`: what is asked about a query and its items, and the scores that come of the answers. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from nodes.engine.batches import Prompts, is_list, plain
from nodes.gateway.errors import BadRequest
from nodes.gateway.surfaces.generate.surface import GENERATE


class Labels:
    """How likely each of some tokens is to come after a query and an item: as the one token that is generated there.

    `prompts` go to `path`; there are none if there are no items. Raises BadRequest.
    """

    path: ClassVar[str] = GENERATE.path
    num_beside: ClassVar[int] = 0

    def __init__(
        self, query: Any, items: Any, token_ids: Any, fields: Mapping[str, Any], *, softmax: bool, item_first: bool
    ) -> None:
        self._token_ids = _listed("label_token_ids", token_ids)
        if not self._token_ids:
            raise _wrong("label_token_ids", "is empty. Give the ids of the tokens whose probabilities are asked for")
        self._softmax = softmax
        _check_is_free(fields, ("sampling_params", "return_logprob", "token_ids_logprob", "stream"))
        asked: dict[str, Any] = {
            **fields,
            # A mesh may be told to say logprobs of the distribution that is drawn from: let that be the model's own.
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "token_ids_logprob": self._token_ids,
        }
        prompts = _joined(query, _items(items), item_first=item_first)
        given = (prompts, None) if isinstance(query, str) else (None, prompts)
        self.prompts = Prompts(*given, asked) if prompts else None

    def scores(self, answers: list[Any]) -> list[list[float]]:
        """A list for each item, with a number for each token in its order."""
        samples: list[Any] = [] if self.prompts is None else self.prompts.of_each(answers)
        return [self._scores_of(one["meta_info"]["output_token_ids_logprobs"][0]) for one in samples]

    def _scores_of(self, said: Sequence[tuple[float, int, Any]]) -> list[float]:
        found = {token_id: logprob for logprob, token_id, _ in said}
        logprobs = [found[token_id] for token_id in self._token_ids]
        if not self._softmax:
            return [math.exp(logprob) for logprob in logprobs]
        # Less the largest, or of tokens that are all unlikely nothing would be left.
        shares = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
        return [share / sum(shares) for share in shares]


class Pairs:
    """How well items go with a query, for models that give vectors or scores; otherwise as `Labels`."""

    path: ClassVar[str] = "/score"
    num_beside: ClassVar[int] = 1
    """The query, of which a model of embeddings makes a vector in each call."""

    def __init__(self, query: Any, items: Any, fields: Mapping[str, Any]) -> None:
        _check_is_free(fields, ("queries",))
        texts = _items(items)
        for name, given in (("query", [query]), ("items", texts)):
            if not all(isinstance(one, str) for one in given):
                raise _wrong(name, "has to be text, unless 'label_token_ids' are asked for")
        self.prompts = Prompts(texts, None, {**fields, "queries": query}, field="documents") if texts else None

    def scores(self, answers: list[Any]) -> list[float]:
        """A number for each item."""
        return [one["score"] for answer in answers for one in answer["data"]]


Scoring = Labels | Pairs


def scoring_of(
    query: Any, items: Any, token_ids: Any, fields: Mapping[str, Any], *, softmax: bool, item_first: bool
) -> Scoring:
    """What the arguments of `Engine.score` ask for. Raises BadRequest."""
    if token_ids is not None:
        return Labels(query, items, token_ids, fields, softmax=softmax, item_first=item_first)
    for name, is_given in (("apply_softmax", softmax), ("item_first", item_first)):
        if is_given:
            raise _wrong(name, "needs 'label_token_ids': without them the served model says how texts are scored")
    return Pairs(query, items, fields)


def _check_is_free(fields: Mapping[str, Any], taken: Sequence[str]) -> None:
    for name in taken:
        if name in fields:
            raise _wrong(name, "cannot be given: it is what `score` asks with")


def _items(items: Any) -> list[Any]:
    return [items] if isinstance(items, str) else _listed("items", items)


def _listed(name: str, value: Any) -> list[Any]:
    given = plain(value)
    if not is_list(given):
        raise _wrong(name, "has to be a list")
    return list(given)


def _joined(query: Any, items: list[Any], *, item_first: bool) -> list[Any]:
    is_text = isinstance(query, str)
    if not all(isinstance(item, str) if is_text else is_list(item) for item in items):
        raise _wrong("items", "has to be of texts if 'query' is one, or else of lists of token ids")
    first: Any = query if is_text else _listed("query", query)
    rest = items if is_text else [*map(list, cast("list[Sequence[int]]", items))]
    return [item + first if item_first else first + item for item in rest]


def _wrong(name: str, what: str) -> BadRequest:
    return BadRequest(f"'{name}' {what}.", param=name, code="invalid_value")
