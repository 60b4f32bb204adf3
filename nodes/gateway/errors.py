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
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from nodes.gateway.requests.events import Failure
from nodes.protocol.attempts import OVER_SHARE

NameOf = Callable[[str], str]
"""What a client calls a field of the body that its own was made into; other fields keep their names."""
_QUOTED: Final = re.compile(r"'([a-z_]\w*(?:\.\w+)*)'")
_OF_ROLES: Final = ("prompt", "messages")
"""The names that roles behind a gateway have for what a client sends."""


def renamed(message: str, name_of: NameOf) -> str:
    """The message with the client's names for all fields that it quotes."""
    return _QUOTED.sub(lambda found: f"'{name_of(found[1])}'", message)


class ApiError(Exception):
    """An answer other than 2xx. `type` and `code` follow OpenAI's names where it has one."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Those that its answer has besides, if it is a whole one."""
    is_logged = False
    """Whether the failed request has been logged already, where the error was raised."""

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

    def rename(self, name_of: NameOf) -> None:
        """Have it name the client's fields. Once: what is renamed may be the name of another field."""
        self.message = renamed(self.message, name_of)
        self.param = self.param and name_of(self.param)

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


class BadRequest(ApiError):
    """The client's mistake; sending it again changes nothing."""

    status = 400
    type = "invalid_request_error"
    code = None


class Unauthorized(BadRequest):
    """No API key, or not one of this server's. Anthropic's surface says `authentication_error` for it."""

    status = 401
    code = "invalid_api_key"
    # HTTP wants it said which kind of key would do (RFC 9110, 15.5.2).
    headers = ((b"www-authenticate", b"Bearer"),)


class Forbidden(BadRequest):
    """Whoever asks may not have this done."""

    status = 403
    type = "permission_error"
    code = "admin_key_required"


class UnknownModel(BadRequest):
    """No such model here."""

    status = 404
    code = "model_not_found"


class UnknownRoute(BadRequest):
    """No such path."""

    status = 404
    code = "not_found"


class WrongMethod(BadRequest):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class TooSlow(BadRequest):
    """A head or a body did not arrive in time."""

    status = 408
    code = "request_timeout"


class Conflict(BadRequest):
    """Somebody else had the opposite done, or the same in another way."""

    status = 409
    code = "undone"


class BodyTooLarge(BadRequest):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class WrongMediaType(BadRequest):
    """A compressed body, or one that is not JSON."""

    status = 415
    code = "unsupported_media_type"


class TooManyRequests(ApiError):
    """This gateway holds as many requests as it may, or as many of this API key."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"


class Internal(ApiError):
    """The server's fault, and not worth a retry."""


class NotYet(ApiError):
    """A route that other servers have and this one does not yet, so that clients learn what is missing."""

    status = 501
    type = "not_implemented_error"
    code = "not_implemented"


class Unavailable(ApiError):
    """A role is missing, full or draining; worth a retry."""

    status = 503
    type = "service_unavailable"
    code = "service_unavailable"


class TimedOut(ApiError):
    """The request took longer than any request may."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


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
