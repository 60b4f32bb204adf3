"""What is told of calls whose gateway died: read from what it left, in a line like any other call's."""

from pathlib import Path

import msgspec
import pytest

from cli.supervisor.kept.cut_calls import GATEWAY_DIED, LEFT_BEHIND, dead_gateways, end_calls, read_cut_calls
from cli.trace.lines import read_calls
from cli.trace.text import row, story
from mesh.address import Address
from mesh.runtime.trace_ring import map_ring
from nodes.call_spans import sample_spans
from nodes.gateway.records.open_calls import OpenCalls, open_calls_path
from nodes.protocol.records import CallRecord, FindCalls
from nodes.trace_notes import Noted

DEAD = Address("gateway-0.a", 7)
REASON = "signal 9 (SIGKILL)"


class Left:
    """A gateway that notes things and then is not there any more."""

    def __init__(self, folder: Path) -> None:
        self.requests, self.traces = folder / "requests", folder / "trace"
        self.now = 100.0
        self.ring = map_ring(self.traces, DEAD, lambda: self.now)
        self.path = open_calls_path(self.requests, *DEAD)
        self.open = OpenCalls(self.path)

    def begin(self, request_id: str, **names: str) -> int:
        call = CallRecord(
            request_id=request_id, gateway=DEAD.actor_id, host="a", at=1.7e9, clock_s=self.now, read_s=0.25, **names
        )
        return self.open.put(call)

    def note(self, at: float, kind: Noted, name: str, a: int = 0, b: int = 0) -> None:
        self.now = at
        self.ring.note(kind, name, a, b)

    def found(self, name: str) -> CallRecord:
        (call,) = read_calls(self.requests, FindCalls(name=name))
        return call


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def test_a_call_that_was_cut_has_its_line(left: Left) -> None:
    left.begin("c", client_id="mine", route="/v1/chat/completions", key="k")
    left.open.free(left.begin("ended"))
    left.note(100.25, Noted.PREPARING, "c", 1)
    left.note(101.0, Noted.PREPARED, "c", 9, 500_000)
    left.note(101.5, Noted.SUBMITTED, "c-0", 0, 9)
    left.note(101.75, Noted.ANSWERED, "c-0", 0, 1)
    left.note(103.0, Noted.FIRST, "c-0", 1)
    assert end_calls(left.requests, left.traces, DEAD, REASON, 105.0) == 1
    assert not left.path.exists()
    call = left.found("mine")
    assert (call.request_id, call.route, call.key, call.status, call.code) == (
        "c", "/v1/chat/completions", "k", 0, GATEWAY_DIED,
    )  # fmt: skip
    assert (call.prompt_tokens, call.attempts, call.num_samples, call.first_token_s) == (9, 1, 1, 3.0)
    told = [(span.name, span.begin_s, span.end_s) for span in sample_spans(call, call.samples[0])]
    assert told == [
        ("body", 0.0, 0.25),
        ("tokenizer's way", 0.25, 0.5),
        ("tokenize", 0.5, 1.0),
        ("gateway", 1.0, 1.5),
        ("submit", 1.5, 1.75),
        ("ways", 1.75, 3.0),
        ("output", 3.0, 5.0),
    ]
    text = "\n".join(story(call))
    assert "not answered whole, gateway_died" in text
    assert f"at 5.000 s gateway-0.a died: {REASON}" in text
    assert row(call)[3] == "-"
    # Nothing is told twice.
    assert end_calls(left.requests, left.traces, DEAD, REASON, 106.0) == 0


def test_each_attempt_and_each_sample_is_told(left: Left) -> None:
    left.begin("c")
    left.note(100.5, Noted.PREPARED, "c", 9)
    for number in range(2):
        left.note(101.0, Noted.SUBMITTED, f"c-{number}", 0, 9)
    left.note(101.5, Noted.ANSWERED, "c-0", 0, 0)
    left.note(102.0, Noted.SUBMITTED, "c-0", 1, 9)
    left.note(102.0, Noted.SUBMITTED, "c-1", 0, 9)
    left.note(102.5, Noted.ANSWERED, "c-1", 0, 1)
    left.note(103.0, Noted.SUBMITTED, "c-1", 1, 9)
    end_calls(left.requests, left.traces, DEAD, REASON, 104.0)
    call = left.found("c")
    assert (call.num_samples, call.attempts) == (2, 2)
    told = [
        [(one.attempt, one.submitted_s, one.accepted_s, one.ended_s, one.failure) for one in sample.attempts]
        for sample in call.samples
    ]
    assert told == [
        [(0, 1.0, -1, 1.5, "not_told"), (1, 2.0, -1, 4.0, GATEWAY_DIED)],
        [(0, 1.0, 2.5, 3.0, "not_told"), (1, 3.0, -1, 4.0, GATEWAY_DIED)],
    ]
    assert [span.name for span in sample_spans(call, call.samples[0])][-2:] == ["retry", "submit"]


def test_a_call_says_what_it_was_in(left: Left) -> None:
    left.begin("asked")
    left.begin("prepared")
    left.note(100.5, Noted.PREPARED, "prepared", 9)
    end_calls(left.requests, left.traces, DEAD, REASON, 104.0)
    assert sample_spans(left.found("asked"), None)[-1].name == "tokenizer"
    assert sample_spans(left.found("prepared"), None)[-1].name == "gateway"


def test_without_its_ring_and_with_damaged_files_what_is_there_is_told(left: Left) -> None:
    left.begin("c")
    left.note(101.0, Noted.PREPARING, "c", 1)
    for path in left.traces.iterdir():
        path.unlink()
    assert [one.total_s for one in read_cut_calls(left.path, left.traces, DEAD, REASON)] == [0.0]
    left.path.write_bytes(b"damaged")
    assert end_calls(left.requests, left.traces, DEAD, REASON, 104.0) == 0
    assert read_cut_calls(left.requests / "nothing", left.traces, DEAD, REASON) == []


def test_gateways_that_ended_with_their_supervisor_are_found(left: Left) -> None:
    left.begin("c")
    left.note(102.0, Noted.PREPARING, "c", 1)
    (left.requests / "foreign.open").write_bytes(b"")
    assert dead_gateways(left.requests) == [DEAD]
    (call,) = read_cut_calls(left.path, left.traces, DEAD, LEFT_BEHIND)
    assert (call.total_s, call.deaths[0].reason) == (2.0, LEFT_BEHIND), "when it noted something last"
    assert dead_gateways(left.requests / "nothing") == []


def test_a_line_after_half_of_one_is_whole(left: Left) -> None:
    left.begin("c")
    log = left.requests / "gateway-0.a.jsonl"
    log.write_bytes(b'{"request_id":"half')
    end_calls(left.requests, left.traces, DEAD, REASON, 104.0)
    assert msgspec.json.decode(log.read_bytes().splitlines()[-1])["request_id"] == "c"
