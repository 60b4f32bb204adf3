"""Spans tile a call's time, whatever became of it, and each thing that took long is in the span of its name."""

import json
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cli.trace.chrome import events
from cli.trace.lines import newest, read_calls
from cli.trace.text import row, story
from nodes.call_spans import Span, sample_spans
from nodes.protocol.records import (
    NOT_YET,
    AttemptRecord,
    CallRecord,
    DeathRecord,
    FindCalls,
    SampleRecord,
    StallRecord,
)

WHOLE = CallRecord(
    request_id="c", gateway="g", at=1.7e9, route="/v1/chat/completions", status=200, finish="stop", total_s=12.0,
    read_s=0.5, prepared_s=1.5, tokenize_s=0.25, template_s=0.2, first_token_s=5.0, num_samples=1, prompt_tokens=9,
    output_tokens=30, attempts=2,
    samples=[
        SampleRecord(
            request_id="c-0", first_token_s=5.0, last_token_s=10.75, ended_s=11.0, finish="stop",
            attempts=[
                AttemptRecord(attempt=0, scheduler="d", prefill="p", submitted_s=1.5, accepted_s=1.6, first_s=5.0,
                              ended_s=8.0, queue_s=1.0, grant_s=0.5, prefill_s=1.25, transfer_s=0.25,
                              failure="peer_lost", why="killed by SIGKILL"),
                AttemptRecord(attempt=1, scheduler="e", submitted_s=9.0, accepted_s=9.1, first_s=10.0, ended_s=11.0,
                              prefill_s=0.9),
            ],
            stalls=[StallRecord(position=12, ended_s=7.0, took_s=1.0)],
        )
    ],
    deaths=[DeathRecord(actor="scheduler-d", at_s=8.0, reason="killed by SIGKILL")],
)  # fmt: skip


def test_a_call_that_survived_a_death() -> None:
    spans = sample_spans(WHOLE, WHOLE.samples[0])
    told = [(span.name, round(span.begin_s, 3), round(span.end_s, 3), span.note) for span in spans]
    assert told == [
        ("body", 0.0, 0.5, ""),
        ("tokenizer's way", 0.5, 1.25, ""),
        ("template", 1.25, 1.45, ""),
        ("tokenize", 1.45, 1.5, ""),
        ("submit", 1.5, 1.6, "d"),
        ("queue", 1.6, 2.6, "d"),
        ("grant", 2.6, 3.1, "d"),
        ("prefill", 3.1, 4.35, "p"),
        ("transfer", 4.35, 4.6, "p to d"),
        ("ways", 4.6, 5.0, ""),
        ("output", 5.0, 6.0, "d"),
        ("stall", 6.0, 7.0, "before token 12"),
        ("output", 7.0, 8.0, "d"),
        ("retry", 8.0, 9.0, "after peer_lost"),
        ("submit", 9.0, 9.1, "e"),
        ("prefill", 9.1, 10.0, "e"),
        ("output", 10.0, 10.75, "e"),
        ("finish", 10.75, 11.0, "e"),
        ("answer", 11.0, 12.0, ""),
    ]
    text = "\n".join(story(WHOLE))
    assert "attempt 0 at d ended at 8.000 s: peer_lost (killed by SIGKILL)" in text
    assert "scheduler-d died: killed by SIGKILL" in text
    assert all(len(line) < 120 for line in story(WHOLE))
    assert row(WHOLE)[4:8] == ["12.000 s", "5.000 s", "9+30", "2"]
    drawn = json.loads(json.dumps(events([WHOLE])))["traceEvents"]
    assert [one["name"] for one in drawn if one["ph"] == "X"] == [name for name, *_ in told]
    assert sum(one["dur"] for one in drawn if one["ph"] == "X") == 12e6


times = st.one_of(st.just(NOT_YET), st.floats(0, 20))
attempts = st.builds(
    AttemptRecord,
    attempt=st.integers(0, 3), scheduler=st.just("d"), submitted_s=st.floats(0, 20), accepted_s=times, first_s=times,
    ended_s=times, queue_s=st.floats(0, 9), grant_s=st.floats(0, 9), prefill_s=st.floats(0, 9),
    transfer_s=st.floats(0, 9), failure=st.sampled_from(["", "peer_lost"]),
)  # fmt: skip
stalls = st.builds(StallRecord, position=st.integers(1, 9), ended_s=st.floats(0, 20), took_s=st.floats(0, 20))
samples = st.builds(
    SampleRecord,
    request_id=st.just("c-0"), first_token_s=times, ended_s=times, attempts=st.lists(attempts, max_size=3),
    stalls=st.lists(stalls, max_size=3),
)  # fmt: skip


@given(st.floats(0.001, 30), times, times, st.floats(0, 9), st.floats(0, 9), st.none() | samples)
def test_spans_tile_any_record(
    total_s: float,
    read_s: float,
    prepared_s: float,
    tokenize_s: float,
    template_s: float,
    sample: SampleRecord | None,
) -> None:
    # Records come from other processes, and from files: whatever they say, a timeline has no gap and no overlap.
    call = CallRecord(
        request_id="c", total_s=total_s, read_s=read_s, prepared_s=prepared_s, tokenize_s=tokenize_s,
        template_s=template_s, samples=[] if sample is None else [sample],
    )  # fmt: skip
    spans = sample_spans(call, sample)
    assert [span.begin_s for span in spans] == [0.0, *(span.end_s for span in spans[:-1])]
    assert spans[-1].end_s == total_s
    assert all(span.took_s > 0 for span in spans)
    assert story(call)


def test_a_call_under_way_says_what_it_waits_for() -> None:
    def last(**fields: object) -> Span:
        call = msgspec.convert({"request_id": "c", "total_s": 9.0, **fields}, CallRecord)
        return sample_spans(call, call.samples[0] if call.samples else None)[-1]

    assert last().name == "body"
    assert last(read_s=1.0).name == "tokenizer"
    attempt: dict[str, object] = {"attempt": 0, "scheduler": "d", "submitted_s": 2.0}
    here: dict[str, object] = {"read_s": 1.0, "prepared_s": 2.0}

    def at(**fields: object) -> Span:
        return last(**here, samples=[{"request_id": "c-0", "attempts": [attempt | fields]}])

    assert at() == Span("submit", 2.0, 9.0, "d")
    assert at(accepted_s=3.0) == Span("waiting", 3.0, 9.0, "d")
    assert at(accepted_s=3.0, first_s=4.0) == Span("stall", 4.0, 9.0, "0 tokens came")
    assert at(ended_s=3.0, failure="overloaded") == Span("retry", 3.0, 9.0, "after overloaded")


def test_lines_are_found_behind_damaged_ones_and_in_the_file_before(tmp_path: Path) -> None:
    calls = [
        CallRecord(request_id=f"req-{number}", client_id="mine" if number % 2 else "", at=float(number), total_s=1.0)
        for number in range(6)
    ]
    lines = [msgspec.json.encode(call) + b"\n" for call in calls]
    (tmp_path / "g.jsonl.1").write_bytes(b"".join(lines[:3]))
    (tmp_path / "g.jsonl").write_bytes(b'{"request_id": "req-9", "att\n\xff\xfe\n[]\n' + b"".join(lines[3:]))
    (tmp_path / "h.jsonl").write_bytes(lines[5])

    def found(**query: object) -> list[str]:
        wanted = msgspec.convert(query, FindCalls)
        return [call.request_id for call in newest(read_calls(tmp_path, wanted), wanted)]

    assert found(name="req-4") == ["req-4"]
    assert found(name="req-4-17") == ["req-4"], "a sample's id means its call"
    assert found(name="mine") == ["req-1", "req-3", "req-5"]
    assert found(name="req-9") == []
    assert found(last=2) == ["req-4", "req-5"]
    assert found(slowest=9) == [f"req-{number}" for number in range(6)] or len(found(slowest=9)) == 6
    assert read_calls(tmp_path / "nothing", FindCalls(last=1)) == []


def test_a_gateway_s_own_record_comes_before_its_line() -> None:
    line = CallRecord(request_id="c", total_s=1.0, sampled=4)
    assert newest([WHOLE, line], FindCalls(last=5)) == [WHOLE]
    slow = [CallRecord(request_id=f"c{number}", total_s=float(number)) for number in (3, 1, 2)]
    assert [one.total_s for one in newest(slow, FindCalls(slowest=2))] == [2.0, 3.0]
