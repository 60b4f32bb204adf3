"""What a response says of the call that it answers, before there is any output. Pure."""

from collections.abc import Mapping

from msgspec import UNSET, Raw, UnsetType

from nodes.gateway.surfaces.responses.answer import Response
from nodes.gateway.surfaces.responses.translation import Asked
from nodes.request import Sampling


def first_response(
    asked: Asked, response_id: str, *, created: int, model: str, sampling: Sampling, is_kept: bool
) -> Response:
    """`sampling` is what is done, defaults filled in; `is_kept` whether the response is going to be stored."""
    body, fields = asked.body, asked.fields
    return Response(
        id=response_id,
        created_at=created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=_given(fields, "prompt_cache_key"),
        reasoning=_given_or(fields, "reasoning", b'{"effort":null,"summary":null}'),
        safety_identifier=_given(fields, "safety_identifier"),
        store=is_kept,
        temperature=sampling.temperature,
        text=_given_or(fields, "text", b'{"format":{"type":"text"}}'),
        tool_choice=_given_or(fields, "tool_choice", b'"auto"'),
        tools=_given_or(fields, "tools", b"[]"),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        user=body.user,
    )


def _given(fields: Mapping[str, Raw], name: str) -> Raw | UnsetType:
    given = fields.get(name)
    return UNSET if given is None or bytes(given) == b"null" else given


def _given_or(fields: Mapping[str, Raw], name: str, default: bytes) -> Raw:
    given = _given(fields, name)
    return given if isinstance(given, Raw) else Raw(default)
