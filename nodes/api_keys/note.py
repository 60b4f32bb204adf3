"""Where the hosts' files of API keys differ, by what gateways announce. Pure."""

from collections.abc import Iterable

import msgspec

from mesh.membership.view import Member
from nodes.roles import GATEWAY, GatewayAttributes


def api_keys_notes(members: Iterable[Member]) -> list[str]:
    """Lines for people if gateways have other keys than others, or none while others do, or cannot read theirs."""
    found: dict[str, list[str]] = {}
    troubles: list[str] = []
    for member in members:
        if member.role != GATEWAY:
            continue
        try:
            said = msgspec.convert(member.attributes, GatewayAttributes)
        except msgspec.ValidationError:
            # A custom actor of this role name uses the attribute for something else.
            continue
        found.setdefault(said.api_keys, []).append(member.actor_id)
        if said.api_keys_trouble:
            troubles.append(f"{member.actor_id} goes on with the API keys that it had: {said.api_keys_trouble}")
    open_ids, groups = sorted(found.pop("", [])), sorted(map(sorted, found.values()))
    notes: list[str] = []
    if open_ids and groups:
        notes.append(f"no API key is asked for by {', '.join(open_ids)}: give its host --api-key-file, as others have")
    if len(groups) > 1:
        texts = "; ".join(", ".join(ids) for ids in groups)
        notes.append(f"API keys differ between gateways, give their hosts the same file: {texts}")
    return notes + troubles
