"""Grants, announcements and news one by one, as tests speak of them; on the wire they go together."""

from collections.abc import Sequence
from typing import Any

from kvstore.protocol import (
    AnnouncePages,
    GrantsOpened,
    OpenGrant,
    OpenGrants,
    PagesPulled,
    PagesReady,
    TransferFailed,
)
from mesh.errors import RemoteError


def grant_of(pages: Sequence[int], layout_digest: bytes, **fields: Any) -> OpenGrant:
    """Of group `d`, by D in its first epoch, for pages of generation 7; unless something else is said."""
    known = {"grant_id": "g", "group": "d", "generations": [7] * len(pages), "holder": "D", "holder_epoch": 1}
    return OpenGrant(**{**known, "timeout_s": 20.0, "pages": list(pages), "layout_digest": layout_digest, **fields})


def ready_of(pages: Sequence[int], layout_digest: bytes, **fields: Any) -> PagesReady:
    """All that there are of group `p`, at generation 7; unless something else is said."""
    known = {"grant_id": "g", "first": 0, "total": len(pages), "source_group": "p", "generations": [7] * len(pages)}
    return PagesReady(**{**known, "pages": list(pages), "layout_digest": layout_digest, **fields})


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
        raise RemoteError(refused.code, "")
    return answer


def news(message: Any) -> list[PagesPulled | TransferFailed]:
    """What one tell of an agent says."""
    return [*message.pulled, *message.failed]
