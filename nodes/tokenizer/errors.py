"""Why a request cannot be prepared.

    PrepareError
    ├── InvalidRequest          invalid_request            not exactly one of chat, texts and token ids
    ├── TemplateError           template_error             the chat does not fit the model's template
    ├── UnsupportedContent      unsupported_content        content that is not text
    ├── EmptyPrompt             empty_prompt               no token to begin with
    ├── InvalidTokenId          invalid_token_id           an id the model has no embedding for
    ├── ContextLengthExceeded   context_length_exceeded    longer than the model's context
    ├── UnsupportedAsk          unsupported_ask            no group can do what the request asks of its draws
    ├── InvalidValue            invalid_value              a value that no worker could do anything with
    ├── UnsupportedSchema       unsupported_schema         a schema with keywords that cannot be enforced
    ├── NoCapacity              no_capacity             r  no scheduler or no detokenizer is ready
    │   └── MemoryReleased      memory_released         r  the memory of all groups is released
    └── Overloaded              overloaded              r  too many long texts are being worked on

`r`: retryable. Codes and `param` cross the wire as they are; the gateway makes HTTP errors of them.
"""

from mesh.errors import TypedError
from nodes.protocol.attempts import UNSUPPORTED_ASK
from nodes.protocol.memory import MEMORY_RELEASED


class PrepareError(TypedError, code="prepare_error"):
    """Base of all; `param` names the field of the client's request."""


class InvalidRequest(PrepareError, code="invalid_request"):
    """The peer's question contradicts itself."""


class TemplateError(PrepareError, code="template_error"):
    """The chat cannot be rendered: the template refuses it, fails, takes too long, or there is no template."""


class UnsupportedContent(PrepareError, code="unsupported_content"):
    """A part of a message is an image, audio, or something unknown."""


class EmptyPrompt(PrepareError, code="empty_prompt"):
    """The prompt has no tokens."""


class InvalidTokenId(PrepareError, code="invalid_token_id"):
    """A token id is outside the model's vocabulary."""


class ContextLengthExceeded(PrepareError, code="context_length_exceeded"):
    """The prompt leaves no room for an output token."""


class UnsupportedAsk(PrepareError, code=UNSUPPORTED_ASK):
    """No ready group has a worker that can do what the request asks of its draws; `param` is the ask's name."""


class InvalidValue(PrepareError, code="invalid_value"):
    """What the request asks of its draws, or how much it wants to be read, was tried out and cannot be done."""


class UnsupportedSchema(PrepareError, code="unsupported_schema"):
    """Not all of a schema can be enforced, and the client wants all or nothing."""


class NoCapacity(PrepareError, code="no_capacity", retryable=True):
    """No actor that could serve the request is ready."""


class MemoryReleased(NoCapacity, code=MEMORY_RELEASED):
    """Every group that could serve the request has released its memory, until an operator resumes it."""


class Overloaded(PrepareError, code="overloaded", retryable=True):
    """Too much slow work is waiting already."""


ERRORS_BY_CODE = {error.code: error for error in (*PrepareError.__subclasses__(), *NoCapacity.__subclasses__())}
"""For raising again an error that the rendering child reported."""
