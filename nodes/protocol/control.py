"""What clients may do to work under way and to what is kept of it (SGLang's `/abort_request`, `/flush_cache`)."""

from typing import Final

from mesh.wire.message import Message

BUSY: Final = "busy"
"""Code of a refusal to forget what requests under way may still need."""


class AbortRequests(Message, frozen=True):
    """Ask a gateway to end requests with what they have for an answer: those that `owner` calls `rid`, or all of them
    if `rid` is empty, or with `everybody` all that it holds.

    `owner` is the name of an API key, empty without keys: requests of others are not meant, whatever they are called.
    """

    owner: str = ""
    rid: str = ""
    everybody: bool = False


class RequestsAborted(Message, frozen=True):
    """Answer to `AbortRequests`: so many requests were meant and are over. A second ask finds none."""

    num: int


class FlushCache(Message, frozen=True):
    """Ask a scheduler to forget every cached prefix. It does once nothing is under way there, for which it waits up to
    1 s; then it refuses (`busy`, retryable).
    """


class CacheFlushed(Message, frozen=True):
    """Answer to `FlushCache`: so many cached pages are free now."""

    num_pages: int
