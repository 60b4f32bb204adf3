"""Items of an input that name an item of a response that is kept, as npm's `ai` sends them unless `store` is false."""

import re
from typing import Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from nodes.gateway.surfaces.responses.answer import RESPONSE_ID_PREFIX
from nodes.gateway.surfaces.responses.kept import KeptResponses, NoSuchResponse
from nodes.gateway.surfaces.responses.translation import Asked, stored_items

REFERENCE: Final = "item_reference"
_ID: Final = re.compile(r"[a-z]+_(.+)_[0-9]+")
"""An item's: that of its response is in it."""


class _Named(Struct, frozen=True):
    id: str | None = None


_ITEMS: Final = msgspec.json.Decoder(list[Raw])
_NAME: Final = msgspec.json.Decoder(_Named)


async def with_items(asked: Asked, kept: KeptResponses, owner: str) -> Asked:
    """What was asked, with the items in the places of their references. Raises `ApiError`."""
    items = asked.body.input
    if isinstance(items, str) or not any(item.type == REFERENCE for item in items):
        return asked
    raw, found = _ITEMS.decode(asked.fields["input"]), dict[str, dict[str, Raw]]()
    for index, item in enumerate(items):
        if item.type == REFERENCE:
            raw[index] = await _item(item.id or "", kept, owner, found, f"input.{index}")
    encoded = msgspec.json.encode(raw)
    body = replace(asked.body, input=stored_items(encoded))
    return asked._replace(body=body, fields={**asked.fields, "input": Raw(encoded)})


async def _item(name: str, kept: KeptResponses, owner: str, found: dict[str, dict[str, Raw]], where: str) -> Raw:
    """`found` are the items, by id, of the responses that were read for this call."""
    made = _ID.fullmatch(name)
    response_id = RESPONSE_ID_PREFIX + (made[1] if made else "")
    try:
        if response_id not in found:
            stored = await kept.read(response_id, owner)
            found[response_id] = {_NAME.decode(one).id or "": one for one in _ITEMS.decode(stored.items)}
        return found[response_id][name]
    except (NoSuchResponse, KeyError):
        raise NoSuchResponse(f"Item with id '{name[:64]}' not found.", param=where, code="item_not_found") from None
