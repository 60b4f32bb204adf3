"""What roles report, as HTTP answers."""

import json

import pytest

from nodes.gateway.errors import ApiError, error_from
from nodes.gateway.requests.events import Failure


@pytest.mark.parametrize(
    ("failure", "status", "param"),
    [
        (Failure("never_fits", "m", False, "max_tokens"), 400, "max_tokens"),
        (Failure("never_fits", "m", False, "prompt"), 400, "messages"),
        (Failure("template_error", "m", False), 400, "messages"),
        (Failure("context_length_exceeded", "m", False, "prompt"), 400, "messages"),
        (Failure("grammar_failed", "m", False), 400, None),
        (Failure("nothing_left", "m", False), 400, None),
        (Failure("editor_failed", "m", False), 500, None),
        (Failure("poisoned_request", "m", False), 500, None),
        (Failure("internal", "m", False), 500, None),
        (Failure("overloaded", "m"), 503, None),
        (Failure("peer_lost", "m"), 503, None),
        (Failure("request_timeout", "m", False), 504, None),
    ],
)
def test_failures_as_answers(failure: Failure, status: int, param: str | None) -> None:
    error = error_from(failure, retry_after_s=7, default_param="messages")
    # Clients look for one code, whoever found a request too long.
    code = "context_length_exceeded" if failure.code == "never_fits" else failure.code
    assert (error.status, error.param, error.code) == (status, param, code)
    assert error.retry_after_s == (7 if status == 503 else None)
    body = json.loads(error.body())["error"]
    assert body == {"message": "m", "type": error.type, "param": param, "code": code}


def test_every_error_has_a_status_of_its_kind() -> None:
    def family(kind: type[ApiError]) -> list[type[ApiError]]:
        return [kind, *(grandchild for child in kind.__subclasses__() for grandchild in family(child))]

    for kind in family(ApiError):
        client_s_fault = kind.type in ("invalid_request_error", "permission_error", "rate_limit_error")
        assert (400 <= kind.status < 500) == client_s_fault
