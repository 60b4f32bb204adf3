"""Why a request cannot be prepared.

    PrepareError
    ├── InvalidRequest          invalid_request          not one of chat, texts and token ids
    ├── TemplateError           template_error             the chat does not fit the model's template
    ├── UnsupportedContent      unsupported_content        content that is not text
    ├── EmptyPrompt             empty_prompt               no token to begin with
    ├── InvalidTokenId          invalid_token_id           an id the model has no embedding for
    ├── ContextLengthExceeded   context_length_exceeded    longer than the model's context
    ├── NoCapacity              no_capacity             r  no scheduler or no detokenizer is ready
    │   └── MemoryReleased      memory_released         r  the memory of all groups is released
    └── Overloaded              overloaded              r  too many long texts are being worked on

`r`: retryable. Codes and `param` cross the wire as they are; the gateway makes HTTP errors of them.
"""

from nodes.protocol.memory import MEMORY_RELEASED


class PrepareError(Exception):
    """Base of all; `param` names the field of the client's request."""

    code = "prepare_error"
    retryable = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(PrepareError):
    """The asking peer contradicts itself."""

    code = "invalid_request"


class TemplateError(PrepareError):
    """The chat cannot be rendered: the template refuses it, fails, takes too long, or there is no template."""

    code = "template_error"


class UnsupportedContent(PrepareError):
    """A part of a message is an image, audio, or something unknown."""

    code = "unsupported_content"


class EmptyPrompt(PrepareError):
    """The prompt has no tokens."""

    code = "empty_prompt"


class InvalidTokenId(PrepareError):
    """A token id is outside the model's vocabulary."""

    code = "invalid_token_id"


class ContextLengthExceeded(PrepareError):
    """The prompt leaves no room for an output token."""

    code = "context_length_exceeded"


class NoCapacity(PrepareError):
    """Nobody who could serve the request is ready."""

    code = "no_capacity"
    retryable = True


class MemoryReleased(NoCapacity):
    """Everybody who could serve the request has released its memory, until an operator has it resumed."""

    code = MEMORY_RELEASED


class Overloaded(PrepareError):
    """Too much work of the slow kind is waiting already."""

    code = "overloaded"
    retryable = True


ERRORS_BY_CODE = {
    error.code: error
    for error in (
        TemplateError,
        UnsupportedContent,
        EmptyPrompt,
        InvalidTokenId,
        ContextLengthExceeded,
        NoCapacity,
        MemoryReleased,
        Overloaded,
    )
}
"""How an error that came out of the rendering child is raised again."""
