"""Grants, announcements and news one by one, as tests speak of them; on the wire they go together."""

from typing import Any

from kvstore.protocol import (
    AnnouncePages,
    GrantsOpened,
    OpenGrant,
    OpenGrants,
    PagesPulled,
    PagesReady,
    TransferFailed,
    TransferNews,
)
from mesh.errors import RemoteError


def together(message: Any) -> Any:
    """What carries this one alone."""
    match message:
        case OpenGrant():
            return OpenGrants(grants=[message])
        case PagesReady():
            return AnnouncePages(announced=[message])
    return message


def outcome(answer: Any) -> Any:
    """The answer to what named one grant; raises what that was refused with."""
    for refused in answer.refused if isinstance(answer, GrantsOpened) else ():
        raise RemoteError(refused.code, refused.message, retryable=refused.retryable)
    return answer


def news(message: Any) -> list[PagesPulled | TransferFailed]:
    """What one tell of an agent says."""
    assert isinstance(message, TransferNews)
    return [*message.pulled, *message.failed]
