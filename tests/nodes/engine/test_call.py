"""What an engine's call gives its route, and makes of what that writes."""

from typing import Any
from unittest.mock import Mock

import pytest

from nodes.engine.call import EngineCall
from nodes.engine.event_buffer import EventBuffer
from nodes.gateway.errors import BodyTooLarge, Unavailable
from nodes.gateway.request_names import RequestNames


def call(events: EventBuffer, shown: Any = None, most: int = 10) -> EngineCall:
    return EngineCall(RequestNames("cmpl-1"), Mock(), b'{"a": 1}', most, events, shown)


async def test_a_body_is_as_it_was_made_and_bounded() -> None:
    assert await call(EventBuffer()).read_body() == b'{"a": 1}'
    with pytest.raises(BodyTooLarge, match="larger than 7 bytes"):
        await call(EventBuffer(), most=7).read_body()


async def test_a_whole_answer_is_kept_with_its_status() -> None:
    one = call(EventBuffer())
    await one.respond(200, b"{}")
    assert (one.status, one.answer, one.error) == (200, b"{}", None)


async def test_a_stream_is_its_events_as_they_are_shown() -> None:
    events = EventBuffer()
    one = call(events, lambda event: event | {"index": 4})
    await one.start_stream()
    one.write_now(b'data: {"n": 1}\n\ndata: {"n": 2}\n\n')
    await one.write(b'data: {"n": 3}\n\ndata: [DONE]\n\n', more=False)
    assert await events.take() == [{"n": number, "index": 4} for number in (1, 2, 3)]


async def test_an_error_ends_a_stream_after_what_is_written_before_it() -> None:
    events, error = EventBuffer(), Unavailable("gone")
    one = call(events)
    await one.start_stream(lambda _: b'data: {"usage": 5}\n\ndata: {"error": {"message": "gone"}}\n\n')
    await one.fail(error)
    assert (await events.take(), one.error, one.status) == ([{"usage": 5}], error, 200)


async def test_an_error_before_an_answer_is_all_there_is() -> None:
    events, error = EventBuffer(), Unavailable("full")
    one = call(events)
    await one.fail(error)
    assert (one.error, one.status, one.answer) == (error, 0, b"")


async def test_who_does_not_read_is_waited_for() -> None:
    one = call(EventBuffer())
    await one.start_stream()
    assert not one.is_paused
    one.write_now(b'data: {"n": 1}\n\n' * 64)
    assert one.is_paused
