"""Every error answer of the HTTP surface, in OpenAI's form.

    ApiError                    status, type, code, param, message, retry_after_s
      BadRequest        400     invalid_request_error
      Unauthorized      401     invalid_api_key
      Forbidden         403     admin_key_required, control_off
      UnknownModel      404     model_not_found
      UnknownRoute      404     not_found
      WrongMethod       405     method_not_allowed
      TooSlow           408     request_timeout
      Conflict          409     undone, already_released
      BodyTooLarge      413     body_too_large
      WrongMediaType    415     unsupported_media_type
      TooManyRequests   429     too_many_requests, rate_limit_exceeded, over_share, with
                                  Retry-After
      Internal          500     internal_error, poisoned_request
      NotYet            501     not_implemented
      Unavailable       503     with Retry-After
      TimedOut          504     request_timeout

Raised by validation and the routes; written by `http/call.py` as a response, or by `answers/sse.py` as a stream's last
event.
"""

import re
from collections.abc import Mapping
from typing import Final, Protocol, TypeVar

import msgspec

from nodes.gateway.requests.events import Failure
from nodes.protocol.attempts import OVER_SHARE

Value = TypeVar("Value")
Names = Mapping[str, str]
"""What a surface calls fields that chats or completions have under another name, by that name."""
_QUOTED: Final = re.compile(r"'([a-z_]\w*(?:\.\w+)*)'")
_OF_ROLES: Final = ("prompt", "messages")
"""The names that roles behind a gateway have for what a client sends."""


def name_in(names: Names, param: str) -> str:
    """What a surface calls a field, or what is inside of it, by its path; other fields keep their names."""
    head, inside = param, ""
    while head and head not in names:
        head, dot, last = head.rpartition(".")
        inside = f"{dot}{last}{inside}"
    return names[head] + inside if head else param


class ApiError(Exception):
    """An answer other than 2xx. `type` and `code` follow OpenAI's names where it has one.

    A kind declares what its base does not say already, as in `class NotYet(ApiError, status=501)`.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Those that its answer has besides, if it is a whole one."""
    is_logged = False
    """Whether the failed request has been logged already, where the error was raised."""

    def __init_subclass__(cls, *, status: int | None = None, type: str | None = None, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.status, cls.type, cls.code = status or cls.status, type or cls.type, code or cls.code

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if retry_after_s is not None:
            self.headers = ((b"retry-after", b"%d" % retry_after_s),)
        if code is not None:
            self.code = code

    def rename(self, names: Names) -> None:
        """Have it name the client's fields. Once: what is renamed may be the name of another field."""
        if names:
            self.message = _QUOTED.sub(lambda found: f"'{name_in(names, found[1])}'", self.message)
            self.param = self.param and name_in(names, self.param)

    def __str__(self) -> str:
        # Not what it was made with: a surface may have put its own field's name into the message.
        return self.message

    def body(self, request_id: str = "") -> bytes:
        """The JSON document `{"error": {message, type, param, code, request_id}}`; no id if there is none yet."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if request_id:
            error["request_id"] = request_id
        return msgspec.json.encode({"error": error})


class ErrorForm(Protocol):
    """How a surface tells its clients of errors."""

    def status(self, error: ApiError) -> int:
        """The status of an answer that is this error."""
        ...

    def body(self, error: ApiError, request_id: str) -> bytes:
        """Its body, JSON."""
        ...

    def event(self, error: ApiError, request_id: str) -> bytes:
        """The last event of a stream that broke."""
        ...


class OpenAIErrors(ErrorForm):
    """Whose clients raise the event."""

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        return error.body(request_id)

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"data: " + error.body(request_id) + b"\n\n"


OPENAI_ERRORS = OpenAIErrors()


class BadRequest(ApiError, status=400, type="invalid_request_error"):
    """The client's mistake; sending it again changes nothing."""

    code = None


def invalid(message: str, param: str) -> BadRequest:
    """Of a value that no field can have."""
    return BadRequest(message, param=param, code="invalid_value")


def unsupported(message: str, param: str) -> BadRequest:
    """Of a field, or a value of it, that this server or its model has not."""
    return BadRequest(message, param=param, code="unsupported_parameter")


def required(value: Value | None, param: str) -> Value:
    """The value of a field. Raises BadRequest if there is none."""
    if value is None:
        message = f"Missing required parameter: '{param}'."
        raise BadRequest(message, param=param, code="missing_required_parameter")
    return value


class Unauthorized(BadRequest, status=401, code="invalid_api_key"):
    """No API key, or not one of this server's. Anthropic's surface says `authentication_error` for it."""

    # HTTP wants it said which kind of key would do (RFC 9110, 15.5.2).
    headers = ((b"www-authenticate", b"Bearer"),)


class Forbidden(BadRequest, status=403, type="permission_error", code="admin_key_required"):
    """Whoever asks may not have this done."""


class UnknownModel(BadRequest, status=404, code="model_not_found"):
    """No such model here."""


class UnknownRoute(BadRequest, status=404, code="not_found"):
    """No such path."""


class WrongMethod(BadRequest, status=405, code="method_not_allowed"):
    """The path exists, the method does not."""


class TooSlow(BadRequest, status=408, code="request_timeout"):
    """A head or a body did not arrive in time."""


class Conflict(BadRequest, status=409, code="undone"):
    """Somebody else had the opposite done, or the same in another way."""


class BodyTooLarge(BadRequest, status=413, code="body_too_large"):
    """The body is over the limit."""


class WrongMediaType(BadRequest, status=415, code="unsupported_media_type"):
    """A compressed body, or one that is not JSON."""


class TooManyRequests(ApiError, status=429, type="rate_limit_error", code="too_many_requests"):
    """This gateway holds as many requests as it may, or as many of this API key."""


class Internal(ApiError):
    """The server's fault, and not worth a retry."""


class NotYet(ApiError, status=501, type="not_implemented_error", code="not_implemented"):
    """A route that other servers have and this one does not yet, so that clients learn what is missing."""


class Unavailable(ApiError, status=503, type="service_unavailable", code="service_unavailable"):
    """A role is missing, full or draining; worth a retry."""


class TimedOut(ApiError, status=504, type="timeout_error", code="request_timeout"):
    """The request took longer than any request may."""


_CLIENTS_FAULT = frozenset(
    {
        "bad_token_id",
        "context_length_exceeded",
        "empty_prompt",
        "invalid_token_id",
        "template_error",
        "too_large",
        "unsupported_content",
    }
)
"""Codes of tokenizers and schedulers that say the request itself cannot be served."""

_CLIENTS_WORD = {"never_fits": "context_length_exceeded"}
"""Codes that clients get under OpenAI's name: they do not care which role found a request too long."""


def error_from(failure: Failure, *, retry_after_s: int, default_param: str | None = None) -> ApiError:
    """`param`: the client can fix it; `default_param` is its name for what roles call `prompt` or `messages`."""
    code, message, param = _CLIENTS_WORD.get(failure.code, failure.code), failure.message, failure.param
    if param in _OF_ROLES and default_param:
        # Without quotes, amid sentences of which OpenAI's clients know the beginning.
        message, param = re.sub(rf"\b{param}\b", default_param, message), default_param
    if code == "request_timeout":
        return TimedOut(message)
    if code == OVER_SHARE:
        return TooManyRequests(message, code=code, retry_after_s=retry_after_s)
    if failure.retryable:
        return Unavailable(message, code=code, param=param, retry_after_s=retry_after_s)
    if code in ("grammar_failed", "nothing_left"):
        # The fault of a schema, or of fields that contradict each other; a worker does not know which of them had it,
        # and it was not the prompt.
        return BadRequest(message, code=code)
    if param is not None or code in _CLIENTS_FAULT:
        return BadRequest(message, param=param or default_param, code=code)
    return Internal(message, code=code)
