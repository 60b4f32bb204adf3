"""Calls as a tree of spans: under the client's trace or their own, each span inside its parent, the same every time."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.call_spans import sample_spans
from nodes.gateway.records.otel.told_spans import ToldSpan, is_wanted, told_spans, trace_id_of
from nodes.protocol.records import AttemptRecord, CallRecord, DeathRecord, SampleRecord

OURS = "chatcmpl-8dbe5ab94150440f95ea737c3da4abf0"
THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
AT = 1_700_000_000.25

FIRST = AttemptRecord(
    attempt=0, scheduler="d-0", prefill="p-0", detokenizer="t-0", epoch=3, submitted_s=0.5, accepted_s=0.6, first_s=2.0,
    ended_s=3.0, queue_s=0.2, prefill_s=0.8, failure="peer_lost", why="SIGKILL",
)  # fmt: skip
SECOND = msgspec.structs.replace(
    FIRST,
    attempt=1,
    scheduler="d-1",
    submitted_s=3.5,
    accepted_s=3.6,
    first_s=4.0,
    ended_s=5.0,
    queue_s=0.1,
    prefill_s=0.1,
    failure="",
    why="",
)
SAMPLE = SampleRecord(
    request_id=f"{OURS}-0", output_tokens=7, first_token_s=2.0, last_token_s=4.9, ended_s=5.0, finish="stop",
    attempts=[FIRST, SECOND],
)  # fmt: skip
CALL = CallRecord(
    request_id=OURS, at=AT, route="/v1/chat/completions", status=200, finish="stop", total_s=5.5, read_s=0.1,
    prepared_s=0.4, tokenize_s=0.1, num_samples=1, prompt_tokens=9, output_tokens=7, attempts=2, samples=[SAMPLE],
    deaths=[DeathRecord(actor="worker-0", at_s=2.9, reason="signal 9 (SIGKILL)")],
)  # fmt: skip


def by_id(spans: list[ToldSpan]) -> dict[int, ToldSpan]:
    found = {span.span_id: span for span in spans}
    assert len(found) == len(spans), "ids are unique"
    return found


def test_a_call_with_two_attempts_and_a_death() -> None:
    root, *below = told_spans(CALL)
    assert (root.name, root.is_server, root.parent_id) == ("POST /v1/chat/completions", True, 0)
    assert (root.begin_ns, root.end_ns) == (1_700_000_000_250_000_000, 1_700_000_005_750_000_000)
    assert root.attributes["gen_ai.usage.output_tokens"] == 7
    assert root.attributes["kvmesh.request_id"] == OURS
    assert "kvmesh.key" not in root.attributes, "there was none"
    assert not root.failure, "it was served"
    assert [(event.name, event.at_ns, event.attributes) for event in root.events] == [
        ("worker-0 died", 1_700_000_003_150_000_000, {"reason": "signal 9 (SIGKILL)"})
    ]
    first, second = [span for span in below if span.name == "attempt"]
    assert (first.parent_id, first.failure, first.attributes["kvmesh.why"]) == (root.span_id, "peer_lost", "SIGKILL")
    assert (second.failure, second.attributes["kvmesh.scheduler"]) == ("", "d-1")
    named = {first.span_id: "first", second.span_id: "second", root.span_id: "root"}
    stages = [(span.name, named[span.parent_id]) for span in below if span.name != "attempt"]
    assert stages == [
        ("body", "root"), ("tokenizer's way", "root"), ("tokenize", "root"), ("gateway", "root"),
        ("submit", "first"), ("queue", "first"), ("prefill", "first"), ("ways", "first"), ("output", "first"),
        ("retry", "root"),
        ("submit", "second"), ("queue", "second"), ("prefill", "second"), ("ways", "second"), ("output", "second"),
        ("finish", "second"),
        ("answer", "root"),
    ]  # fmt: skip
    assert [span.name for span in below if span.name != "attempt"] == [one.name for one in sample_spans(CALL, SAMPLE)]


def test_samples_are_spans_of_their_own_and_share_what_came_before() -> None:
    other = msgspec.structs.replace(SAMPLE, request_id=f"{OURS}-1", failure="internal", finish="")
    root, *below = told_spans(msgspec.structs.replace(CALL, num_samples=2, samples=[SAMPLE, other]))
    samples = [span for span in below if span.name == "sample"]
    assert [(span.parent_id, span.failure) for span in samples] == [(root.span_id, ""), (root.span_id, "internal")]
    assert [span.name for span in below].count("tokenize") == 1
    assert [span.parent_id for span in below if span.name == "attempt"] == [
        samples[0].span_id, samples[0].span_id, samples[1].span_id, samples[1].span_id,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [(200, "", ""), (400, "bad", ""), (499, "client_left", ""), (200, "client_left", ""), (503, "x", "x"),
     (500, "", "500"), (200, "internal", "internal")],
)  # fmt: skip
def test_what_counts_as_failed(status: int, code: str, failure: str) -> None:
    call = CallRecord(request_id="c", status=status, code=code, total_s=1.0)
    assert told_spans(call)[0].failure == failure


def test_whose_trace_it_is() -> None:
    assert f"{trace_id_of(CALL):032x}" == OURS.removeprefix("chatcmpl-"), "found by our id"
    theirs = msgspec.structs.replace(CALL, traceparent=THEIRS)
    assert f"{trace_id_of(theirs):032x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    root, *below = told_spans(theirs)
    assert (f"{root.parent_id:016x}", root.is_remote_parent) == ("00f067aa0ba902b7", True)
    assert not any(span.is_remote_parent for span in below)
    assert is_wanted(CALL)
    assert is_wanted(theirs)
    assert not is_wanted(msgspec.structs.replace(CALL, traceparent=THEIRS[:-2] + "00")), "its client does not record it"
    for name in ("x", "-", "req-" + "0" * 32, "chatcmpl-" + "g" * 32):
        assert 0 < trace_id_of(CallRecord(request_id=name)) < 1 << 128


times = st.one_of(st.just(-1.0), st.floats(0, 100).map(lambda at: round(at, 4)))
durations = st.floats(0, 10).map(lambda took: round(took, 4))
attempts = st.builds(
    AttemptRecord, attempt=st.integers(0, 9), scheduler=st.just("d"), submitted_s=durations, accepted_s=times,
    first_s=times, ended_s=times, queue_s=durations, grant_s=durations, prefill_s=durations, transfer_s=durations,
    failure=st.sampled_from(["", "peer_lost"]),
)  # fmt: skip
samples = st.builds(
    SampleRecord, request_id=st.just("c-0"), last_token_s=times, ended_s=times, attempts=st.lists(attempts, max_size=4)
)


@given(
    st.builds(
        CallRecord,
        request_id=st.just("c"),
        at=st.floats(0, 2e9),
        total_s=durations,
        read_s=times,
        prepared_s=times,
        tokenize_s=durations,
        num_samples=st.integers(0, 3),
        samples=st.lists(samples, max_size=3),
    )
)
def test_any_record_is_a_tree_whose_stages_are_inside_their_parents(call: CallRecord) -> None:
    spans = told_spans(call)
    assert spans == told_spans(call), "a record has the same spans whenever it is told"
    known, root = by_id(spans), spans[0]
    for span in spans[1:]:
        parent = known[span.parent_id]
        assert span.begin_ns <= span.end_ns
        if span.name not in ("attempt", "sample"):
            # What a record says of an attempt or a sample may be nonsense; stages never leave the call.
            assert root.begin_ns <= span.begin_ns
            assert span.end_ns <= root.end_ns
            if parent.name == "attempt":
                assert parent.begin_ns <= span.begin_ns
                assert span.end_ns <= parent.end_ns
