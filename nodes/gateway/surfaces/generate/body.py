"""The body of POST /generate, and the fields of a completion that it stands for. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, Struct

from nodes.gateway.admission.named_calls import check_names
from nodes.gateway.errors import invalid, unsupported
from nodes.gateway.fields.body_reader import BodyReader
from nodes.gateway.fields.openai_types import MAX_CLIENT_ID_CHARS
from nodes.gateway.fields.unsupported import IGNORED, NEUTRAL_VALUES, is_neutral
from nodes.gateway.jobs.validation import Job, Validator
from nodes.request import TokenId

DEFAULT_TOKENS: Final = 128
"""SGLang's, if `max_new_tokens` is not given."""


Rid = Annotated[str, Meta(max_length=MAX_CLIENT_ID_CHARS)]


class GenerateBody(Struct, frozen=True, kw_only=True):
    """SGLang's `GenerateReqInput` for text: exactly one of `text` and `input_ids`, of one prompt or of several; beside
    it vLLM's `cache_salt`.
    """

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[TokenId] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: Rid | list[Rid] | None = None
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    return_cached_tokens_details: bool | None = None


SAMPLING: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
    "n": "n",
    "sampling_seed": "seed",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
"""Names within `sampling_params`, and those of completions."""
_NAMES: Final = {theirs: f"sampling_params.{name}" for name, theirs in SAMPLING.items()} | {
    "prompt_logprobs": "logprob_start_len",
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}
"""By field of the completion: the field that the client knows it by."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {"stop_regex": ("", []), "custom_params": ({},), "beam_width": (1,)}
_IGNORED: Final = frozenset({"spaces_between_special_tokens", "stream_interval"})
_SAME: Final = ("stream", "model", "priority", "cache_salt", "extra_key")
# Nothing but text goes in.
_OTHER_PROMPTS: Final[dict[str, tuple[Any, ...]]] = {"image_data": ([],), "video_data": ([],), "audio_data": ([],)}
# SGLang's router writes all of these into every body; other values of the first three would be another answer.
_OF_ROUTERS: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,), "return_bytes": (False,), "return_entropy": (False,)
}  # fmt: skip
_OF_LOGS: Final = frozenset({"log_metrics", "no_logs"})
_READER: Final = BodyReader(
    GenerateBody, ignored=IGNORED | _OF_LOGS, neutral=NEUTRAL_VALUES | _OTHER_PROMPTS | _OF_ROUTERS
)


class Shown(NamedTuple):
    """What the answer says beside text, ids and counts: `Job.own`.

    `start`: the first position of the prompt whose logprobs are said; None: of the output alone. `ids` are those whose
    logprobs are said beside each token. `is_list`: prompts came as a list, so answers go as one, too.
    """

    has_logprobs: bool = False
    start: int | None = None
    top: int = 0
    ids: tuple[int, ...] = ()
    has_texts: bool = False
    is_list: bool = False


def read(validator: Validator, data: bytes, request_id: str) -> Job[Shown]:
    """Raises `ApiError`, in which `param` is a field of this body."""
    decoded = _READER.decode(data)
    body: GenerateBody = decoded.body
    prompt_param = _prompt_param(body)
    params, unknown = _sampling(body.sampling_params or {})
    shown = _shown(body)
    completion: dict[str, Any] = {
        "prompt": getattr(body, prompt_param),
        "max_tokens": DEFAULT_TOKENS,
        "return_token_ids": True,
        **{name: getattr(body, name) for name in _SAME},
        **params,
    }
    if shown.has_logprobs:
        completion |= {"logprobs": shown.top, "logprob_token_ids": list(shown.ids)}
        if shown.start is not None:
            completion["prompt_logprobs"] = shown.top
    job = validator.complete(completion, request_id, names=_NAMES | {"prompt": prompt_param})
    return job._replace(
        client_id=body.rid if isinstance(body.rid, str) else "",
        rids=_rids(body.rid, job.num_prompts),
        unknown_fields=[*decoded.unknown_fields, *unknown],
        own=shown,
    )


def _prompt_param(body: GenerateBody) -> str:
    given = [name for name in ("text", "input_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid("Give either 'text' or 'input_ids', and not both.", given[0] if given else "text")
    return given[0]


def _rids(rid: str | list[str] | None, num_prompts: int) -> list[str]:
    """The name of each prompt, if each has one of its own."""
    if not isinstance(rid, list):
        return []
    check_names(rid, num_prompts)
    return rid


def _sampling(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a completion, and names that nobody knows. Raises `BadRequest` for what cannot be served."""
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in fields.items():
        param = f"sampling_params.{name}"
        if name in SAMPLING:
            found[SAMPLING[name]] = value
        elif name in _NEUTRAL:
            if not is_neutral(value, _NEUTRAL[name]):
                raise unsupported(
                    f"'{param}' is not supported by this server.",
                    param,
                )
        elif name not in _IGNORED:
            unknown.append(param)
    return {name: value for name, value in found.items() if value is not None}, unknown


def _shown(body: GenerateBody) -> Shown:
    prompts = body.text if body.text is not None else body.input_ids
    is_list = isinstance(prompts, list) and not any(isinstance(one, int) for one in prompts)
    if not body.return_logprob:
        return Shown(is_list=is_list)
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    return Shown(
        has_logprobs=True,
        start=None if start < 0 else start,
        top=body.top_logprobs_num or 0,
        ids=tuple(body.token_ids_logprob or ()),
        has_texts=bool(body.return_text_in_logprobs),
        is_list=is_list,
    )
