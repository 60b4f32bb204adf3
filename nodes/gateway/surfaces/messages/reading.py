"""From the bytes of a body of the Messages API to the conversation that it is about. Pure."""

import re
from typing import Final

from nodes.gateway.errors import BadRequest
from nodes.gateway.fields.body_reader import BodyReader
from nodes.gateway.surfaces.messages.translation import Translated, translate
from nodes.gateway.surfaces.messages.types import ACCEPTED, REFUSED, CountTokensBody

_BLOCK_TYPE: Final = re.compile(r"^(messages\.\d+\.content\.\d+|system\.\d+)(\.content\.\d+)?(\.source)?\.type$")
_TAG: Final = re.compile(r"invalid value '(\w+)'")


class MessagesReader:
    """Decodes one of the two kinds of bodies."""

    def __init__(self, body_type: type[CountTokensBody]) -> None:
        self._reader = BodyReader(body_type, ignored=ACCEPTED, neutral=REFUSED)

    def read(self, data: bytes) -> Translated:
        """Raises BadRequest, naming the field of the body."""
        try:
            decoded = self._reader.decode(data)
        except BadRequest as error:
            _explain_block(error)
            raise
        return translate(decoded)


def _explain_block(error: BadRequest) -> None:
    """Say of a block that is not read where it is, as Anthropic's API does: Claude Code takes the block out of the
    conversation by `messages.3.content.0.tool_result.content.0.image`, and without that it would send it for ever.
    """
    found, tag = _BLOCK_TYPE.match(error.param or ""), _TAG.search(error.message)
    if found is None or tag is None:
        return
    block, part, source = found.groups()
    place = f"{block}.tool_result{part}" if part else block
    place += f".document.source.{tag[1]}" if source else f".{tag[1]}"
    error.message += (
        f" Input tag '{tag[1]}' of {place} is not supported: this server reads text, and calls of tools. Leave the"
        " block out."
    )
