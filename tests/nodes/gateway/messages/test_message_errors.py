"""Errors in Anthropic's form."""

import json
import re

import pytest

from nodes.context_length import over_context
from nodes.gateway.errors import (
    ApiError,
    BadRequest,
    BodyTooLarge,
    Internal,
    TimedOut,
    TooManyRequests,
    TooSlow,
    Unavailable,
    UnknownModel,
    WrongMethod,
)
from nodes.gateway.surfaces.messages.errors import ANTHROPIC_ERRORS
from nodes.gateway.surfaces.messages.translation import NAMES

CLAUDE_CODE_READS = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
"""What its version 2.1.332 looks for."""


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (UnknownModel("x"), 404, "not_found_error"),
        (WrongMethod("x"), 405, "invalid_request_error"),
        (TooSlow("x"), 408, "invalid_request_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (TooManyRequests("x"), 429, "rate_limit_error"),
        (Internal("x"), 500, "api_error"),
        (Unavailable("x"), 529, "overloaded_error"),
        (TimedOut("x"), 504, "timeout_error"),
    ],
)
def test_status_and_type(error: ApiError, status: int, kind: str) -> None:
    body = ANTHROPIC_ERRORS.body(error, "msg_1")
    assert ANTHROPIC_ERRORS.status(error) == status
    assert json.loads(body) == {
        "type": "error", "error": {"type": kind, "message": "x"}, "request_id": "msg_1"
    }  # fmt: skip
    assert ANTHROPIC_ERRORS.event(error, "msg_1") == b"event: error\ndata: " + body + b"\n\n"


def said(error: ApiError) -> str:
    return json.loads(ANTHROPIC_ERRORS.body(error, ""))["error"]["message"]


@pytest.mark.parametrize(
    ("param", "message", "shown"),
    [
        ("max_tokens", "'max_tokens' is 0.", "'max_tokens' is 0."),
        ("max_tokens", "It is 0.", "max_tokens: It is 0."),
        (None, "It is 0.", "It is 0."),
        ("stop.3", "'stop.3' is empty.", "'stop_sequences.3' is empty."),
        ("tools.1.input_schema", "No grammar takes it.", "tools.1.input_schema: No grammar takes it."),
        ("response_format.json_schema.schema", "Odd.", "output_config.format.schema: Odd."),
        ("reasoning_effort", "'reasoning_effort' is odd.", "'output_config.effort' is odd."),
    ],
)
def test_the_message_names_the_parameter_of_the_body(param: str | None, message: str, shown: str) -> None:
    error = BadRequest(message, param=param)
    error.rename(NAMES)
    assert said(error) == shown


def test_a_prompt_that_is_too_long_is_said_in_words_that_clients_know() -> None:
    error = BadRequest("This model's …", param="messages", code="context_length_exceeded")
    assert said(error) == "prompt is too long: This model's …"
    error.message = over_context(2048, "messages", 10_007)
    assert CLAUDE_CODE_READS.findall(said(error)) == [("10007", "2047")]
    assert said(error).endswith(error.message)
