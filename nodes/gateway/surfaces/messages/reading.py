"""From the bytes of a body of the Messages API to the chat that it asks for. Pure."""

import re
from typing import Final, NamedTuple

import msgspec

from nodes.gateway.body_reader import BodyReader
from nodes.gateway.errors import BadRequest
from nodes.gateway.surfaces.messages.translation import Translated, chat_of
from nodes.gateway.surfaces.messages.types import ACCEPTED, REFUSED, CountTokensBody

_BLOCK_TYPE: Final = re.compile(r"(\.content\.\d+|\.source)\.type$")


class ReadBody(NamedTuple):
    """A body, the JSON of the chat that it was made into, and the names of what has no effect here."""

    body: CountTokensBody
    chat: bytes
    translated: Translated
    unknown_fields: list[str]


class MessagesReader:
    """Decodes one of the two kinds of bodies."""

    def __init__(self, body_type: type[CountTokensBody], *, keep_attribution: bool) -> None:
        self._reader = BodyReader(body_type, ignored=ACCEPTED, neutral=REFUSED)
        self._keep_attribution = keep_attribution

    def read(self, data: bytes) -> ReadBody:
        """Raises BadRequest, naming the field of the body."""
        try:
            decoded = self._reader.decode(data)
        except BadRequest as error:
            if error.param is not None and _BLOCK_TYPE.search(error.param):
                error.message += " Blocks of this type are not supported: this server reads text, and calls of tools."
            raise
        translated = chat_of(decoded.body, keep_attribution=self._keep_attribution)
        skipped = [f"tools.type:{kind[:64]}" for kind in dict.fromkeys(translated.skipped_tools)]
        chat = msgspec.json.encode(translated.chat)
        return ReadBody(decoded.body, chat, translated, decoded.unknown_fields + skipped)
