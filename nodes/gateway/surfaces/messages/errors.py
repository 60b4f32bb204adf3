"""Errors of `/v1/messages` and below in the form of Anthropic's API. Pure."""

from typing import Final, NamedTuple

import msgspec

from nodes.gateway.errors import ApiError
from nodes.gateway.surfaces.messages.types import MessagesErrorBody, MessagesErrorDetail

_OVERLOADED: Final = 529
"""What Anthropic's clients try again for longest; it has no 503."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_TOO_LONG: Final = "prompt is too long"
"""Words that clients look for to shorten a conversation and ask again."""


class ErrorAnswer(NamedTuple):
    """An error as it is answered."""

    status: int
    body: bytes


def error_answer(error: ApiError, request_id: str) -> ErrorAnswer:
    """Anthropic's errors have no field for the parameter, so the message names it."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"{_TOO_LONG}: {message}"
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = MessagesErrorBody(error=MessagesErrorDetail(type=kind, message=message), request_id=request_id)
    return ErrorAnswer(_OVERLOADED if error.status == 503 else error.status, msgspec.json.encode(body))


def error_event(error: ApiError, request_id: str) -> bytes:
    """The last event of a stream that broke."""
    return b"event: error\ndata: " + error_answer(error, request_id).body + b"\n\n"
