"""Errors of `/v1/messages` and below in the form of Anthropic's API. Pure."""

import re
from typing import Final

import msgspec
from typing_extensions import override

from nodes.gateway.errors import ApiError, ErrorForm
from nodes.gateway.surfaces.messages.types import MessagesErrorBody, MessagesErrorDetail

_OVERLOADED: Final = 529
"""Its API has no 503, and its clients wait and try again at this one."""

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
"""Words that its clients look for, to shorten a conversation and ask again."""

_LENGTHS: Final = re.compile(r"maximum context length is (\d+) tokens\. However, your \w+ resulted in (\d+) tokens")


class AnthropicErrors(ErrorForm):
    """They have no field for the parameter, so the message names it."""

    @override
    def status(self, error: ApiError) -> int:
        return _OVERLOADED if error.status == 503 else error.status

    @override
    def body(self, error: ApiError, request_id: str) -> bytes:
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        detail = MessagesErrorDetail(type=kind, message=_message(error))
        return msgspec.json.encode(MessagesErrorBody(error=detail, request_id=request_id))

    @override
    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


ANTHROPIC_ERRORS: Final = AnthropicErrors()


def _message(error: ApiError) -> str:
    if error.code == "context_length_exceeded":
        if (found := _LENGTHS.search(error.message)) is None:
            return f"{_TOO_LONG}: {error.message}"
        # Claude Code reads how much is to be left out from these two numbers. A token of an answer has to fit, too.
        return f"{_TOO_LONG}: {found[2]} tokens > {int(found[1]) - 1} maximum. {error.message}"
    return error.message if (error.param or "") in error.message else f"{error.param}: {error.message}"
