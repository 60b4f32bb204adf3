"""The stream of a response as OpenAI's own types read it, strictly."""

import json
import re
from typing import Any, get_args

from openai.types.responses import ResponseStreamEvent

KINDS: dict[str, Any] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
"""By the name of an event: its type. To try all of them for each event takes tens of milliseconds."""


def story(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the events say, without what differs each time: ids, times, and how texts are cut into deltas."""
    told: list[dict[str, Any]] = []
    hex_id = events[0]["response"]["id"].removeprefix("resp_")
    for event in json.loads(re.sub(r"call_[0-9a-f]{24}", "", json.dumps(events).replace(hex_id, ""))):
        del event["sequence_number"]
        for time in ("created_at", "completed_at"):
            event.get("response", {}).pop(time, None)
        last = told[-1] if told else {}
        if event["type"].endswith(".delta") and (last.get("type"), last.get("item_id")) == (
            event["type"], event["item_id"],
        ):  # fmt: skip
            last["delta"] += event["delta"]
        else:
            told.append(event)
    return told


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Each event; its name is its type, OpenAI's types take it, and numbers count from 0 without a gap."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, said = block.split("\n")
        event = json.loads(said.removeprefix("data: "))
        KINDS[event["type"]].model_validate_json(said.removeprefix("data: "), strict=True)
        events.append(event)
        assert name == f"event: {event['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events
