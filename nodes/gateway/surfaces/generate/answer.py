"""Answers of POST /generate: the text so far, its tokens, and `meta_info`. Pure."""

from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

from nodes.gateway.admission.named_calls import prompt_names
from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import cached_details
from nodes.gateway.fields.openai_types import CachedTokensDetails
from nodes.gateway.requests.events import ABORT, End, Tokens
from nodes.gateway.surfaces.generate.body import Shown

WEIGHT_VERSION: Final = "default"
"""SGLang's name for weights that were never updated: these cannot be."""

TokenLogprob = tuple[float | None, int, str | None]
"""Logprob, token id, and the token's text if the client wants it."""


class MetaInfo(Struct, frozen=True, kw_only=True):
    """What is known of a sample beside its text. Lists of logprobs have an entry for each token."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | None = None
    weight_version: str = WEIGHT_VERSION
    input_token_logprobs: list[TokenLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenLogprob] | None] | UnsetType = UNSET
    output_token_logprobs: list[TokenLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenLogprob] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[TokenLogprob] | None] | UnsetType = UNSET


class GenerateAnswer(Struct, frozen=True, kw_only=True):
    """One sample. In a stream each event has all text and tokens so far, and `index` if a list was sent, or `n`
    asks for several.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class GrowingAnswer:
    """What a sample has said so far."""

    def __init__(self, answering: Answering[Shown], number: int) -> None:
        self._answering, self._number = answering, number
        self._details = answering.details
        self._shown = answering.job.own
        self._name = _name_of(answering, number)
        self._is_listed = self._shown.is_list or len(answering.generation.output.samples) > 1
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._top: list[list[TokenLogprob] | None] = []
        self._named: list[list[TokenLogprob] | None] = []

    def grow(self, text: str, tokens: Tokens | None) -> None:
        """Adds a piece. Raises MalformedPayload."""
        self._text += text
        self._ids += [] if tokens is None else tokens.ids
        for token_id, logprob, likely in self._details.drawn(tokens):
            self._logprobs.append(self._entry(logprob, token_id))
            self._top.append([self._entry(its, one) for one, its in likely[: self._shown.top]])
            if self._shown.ids:
                found = dict(likely)
                self._named.append([self._entry(found[one], one) for one in self._shown.ids])

    def answer(self, end: End | None, *, is_indexed: bool) -> GenerateAnswer:
        """All so far; `end` if that is all. Raises MalformedPayload."""
        generation, number = self._answering.generation, self._number
        sample = generation.output.samples[number]
        counts = sample if end is None else end
        return GenerateAnswer(
            text=self._text,
            output_ids=self._ids,
            meta_info=MetaInfo(
                id=self._name,
                finish_reason=self._reason(end),
                prompt_tokens=generation.num_prompt_tokens[number],
                completion_tokens=sample.num_tokens,
                cached_tokens=counts.num_cached_tokens,
                cached_tokens_details=cached_details(counts.num_cached_tokens, counts.num_restored_tokens),
                **self._all_logprobs(),
            ),
            index=number if is_indexed and self._is_listed else UNSET,
        )

    def _reason(self, end: End | None) -> dict[str, Any] | None:
        if end is None:
            return None
        if end.finish_reason == ABORT:
            return {"type": ABORT, "message": "Aborted", "status_code": None, "err_type": None}
        if end.finish_reason == "length":
            return {"type": "length", "length": len(self._ids)}
        # The model's own end has an id, too, which is its last token.
        matched = end.stop if end.stop is not None else self._ids[-1] if self._ids else None
        return {"type": end.finish_reason, "matched": matched}

    def _all_logprobs(self) -> dict[str, Any]:
        shown = self._shown
        if not shown.has_logprobs:
            return {}
        found: dict[str, Any] = {"output_token_logprobs": self._logprobs}
        if shown.top:
            found["output_top_logprobs"] = self._top
        if shown.ids:
            found["output_token_ids_logprobs"] = self._named
        if shown.start is not None:
            # In whole answers alone: `read` refuses it for streams, whose every event would have all of it.
            found |= self._of_prompt(shown.start)
        return found

    def _of_prompt(self, start: int) -> dict[str, Any]:
        of_prompts = self._details.of_prompts
        first, *_ = of_prompts.ids_of(self._number)
        # Nothing comes before the first token that could say how likely it was.
        logprobs: list[TokenLogprob] = [self._entry(None, first)]
        top: list[list[TokenLogprob] | None] = [None]
        for token_id, logprob, _, likely in of_prompts.read(self._number, self._shown.top):
            logprobs.append(self._entry(logprob, token_id))
            top.append([self._entry(its, one) for one, its in likely])
        found: dict[str, Any] = {"input_token_logprobs": logprobs[start:]}
        if self._shown.top:
            found["input_top_logprobs"] = top[start:]
        return found

    def _entry(self, logprob: float | None, token_id: int) -> TokenLogprob:
        return logprob, token_id, self._details.name(token_id) if self._shown.has_texts else None


def _name_of(answering: Answering[Shown], number: int) -> str:
    """What a sample goes by: its prompt's name, by which it can be aborted, with its number if there are several."""
    job, generation = answering.job, answering.generation
    prompt, sample = divmod(number, generation.samples_per_prompt)
    name = prompt_names(job.rids or job.client_id or answering.head.id, job.num_prompts)[prompt]
    return name if generation.samples_per_prompt == 1 else f"{name}-{sample}"
