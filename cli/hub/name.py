"""`ORG/NAME[@REVISION]`, as people name a model of the hub. Pure."""

import re
from typing import Final, NamedTuple

_PART: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,254}}))?")


class HubName(NamedTuple):
    """A repository and one of its branches, tags or commits; an empty `revision` is the branch `main`."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse_hub_name(text: str) -> HubName | None:
    """None if the text cannot be one, such as a path with another number of slashes."""
    match = _NAME.fullmatch(text)
    return HubName(match[1], match[2] or "") if match is not None else None
