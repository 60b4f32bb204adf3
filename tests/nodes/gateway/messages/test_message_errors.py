"""Errors in Anthropic's form."""

import json

import pytest

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
from nodes.gateway.surfaces.messages.errors import error_answer, error_event


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
    answer = error_answer(error, "msg_1")
    assert answer.status == status
    assert json.loads(answer.body) == {
        "type": "error", "error": {"type": kind, "message": "x"}, "request_id": "msg_1"
    }  # fmt: skip
    assert error_event(error, "msg_1") == b"event: error\ndata: " + answer.body + b"\n\n"


def test_the_message_names_the_parameter() -> None:
    for message in ("'max_tokens' is 0.", "It is 0."):
        said = json.loads(error_answer(BadRequest(message, param="max_tokens"), "").body)["error"]["message"]
        assert said in ("'max_tokens' is 0.", "max_tokens: It is 0.")


def test_a_prompt_that_is_too_long_is_said_in_anthropic_s_words() -> None:
    error = BadRequest("This model's …", param="messages", code="context_length_exceeded")
    assert json.loads(error_answer(error, "").body)["error"]["message"] == "prompt is too long: This model's …"
