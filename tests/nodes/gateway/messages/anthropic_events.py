"""Streams of messages as the `anthropic` package reads them, and stricter: no field that its types do not have."""

import json
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

EVENT: Any = TypeAdapter(RawMessageStreamEvent)


def events_of(stream: bytes) -> list[Any]:
    """All but pings, each decoded strictly by its type."""
    events: list[Any] = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        assert name.startswith("event: "), block
        assert data.startswith("data: "), block
        said = json.loads(data[6:])
        assert said["type"] == name[7:], block
        if said["type"] != "ping":
            event = EVENT.validate_json(data[6:], strict=True)
            assert_declared(event)
            events.append(event)
    assert stream.endswith(b"\n\n")
    return events


def assert_declared(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            assert_declared(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            assert_declared(item)


def message_of(events: list[Any]) -> dict[str, Any]:
    """What the package makes of the events of one answer."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.model_dump(mode="json", exclude_none=True)


def whole_message(body: bytes) -> dict[str, Any]:
    """An answer that was not streamed, decoded strictly."""
    message = Message.model_validate_json(body, strict=True)
    assert_declared(message)
    return message.model_dump(mode="json", exclude_none=True)
