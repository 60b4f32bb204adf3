"""A call that has ended as spans for other tracing systems: those that `meshctl trace` shows, as a tree. Pure.

    call (server)                     its deaths are events of it
    ├── body, tokenize, gateway, …    what was before the first attempt, between two, and after the last
    ├── attempt                       one submission to a scheduler
    │   └── submit, queue, prefill, ways, output, stall, …
    └── sample                        of calls with more than one: each has its attempts and stages below it

A name is what a span is, not whose: schedulers and reasons are in attributes. What is not in a call's record is not
here either: no prompt, no text, no address.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from nodes.call_spans import Span, sample_spans
from nodes.protocol.records import AttemptRecord, CallRecord, SampleRecord

_ID_BYTES: Final = 8
"""As OpenTelemetry has it; a trace's id is twice as long."""
_SAMPLED: Final = 0x01
"""The bit of a traceparent's flags by which its sender says that it records this trace."""


class ToldEvent(NamedTuple):
    """Something that happened during a span; nanoseconds since 1970."""

    name: str
    at_ns: int
    attributes: dict[str, Any]


class ToldSpan(NamedTuple):
    """One span; `parent_id` 0: it has none. Times are nanoseconds since 1970."""

    name: str
    span_id: int
    parent_id: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_server: bool = False
    is_remote_parent: bool = False
    failure: str = ""
    events: list[ToldEvent] = []


def is_wanted(call: CallRecord) -> bool:
    """Whether its trace is recorded: it is, unless its client says that it does not record it."""
    return not call.traceparent or bool(int(call.traceparent[-2:], 16) & _SAMPLED)


def trace_id_of(call: CallRecord) -> int:
    """That of its client, else the digits in our id, by which its spans can be found."""
    if call.traceparent:
        return int(call.traceparent[3:35], 16)
    digits = call.request_id.rpartition("-")[2]
    try:
        # An id of 0 is none.
        return int(digits if len(digits) == 32 else "", 16) or 1
    except ValueError:
        return int.from_bytes(blake2b(call.request_id.encode(), digest_size=2 * _ID_BYTES).digest()) or 1


def told_spans(call: CallRecord) -> list[ToldSpan]:
    """All spans of a call, the call's own first."""
    tree = _Tree(call)
    return [tree.root(), *tree.below()]


class _Tree:
    def __init__(self, call: CallRecord) -> None:
        self._call = call
        self._num = 0
        # The same for all of its spans, so that the record of a call gives the same spans again.
        self._root_id = self._next_id()

    def root(self) -> ToldSpan:
        call = self._call
        parent_id = int(call.traceparent[36:52], 16) if call.traceparent else 0
        # A stream that broke has the status with which it began; that its client left is no failure.
        is_broken = call.status >= 500 or (call.status < 400 and call.code not in ("", "client_left"))
        return self._span(
            f"POST {call.route}" if call.route else "call", parent_id, 0.0, call.total_s, _of_call(call), self._root_id
        )._replace(
            is_server=True,
            is_remote_parent=bool(parent_id),
            failure=(call.code or str(call.status)) if is_broken else "",
            events=[
                ToldEvent(f"{death.actor} died", self._ns(death.at_s), {"reason": death.reason})
                for death in call.deaths
            ],
        )

    def below(self) -> Iterator[ToldSpan]:
        call = self._call
        for number, sample in enumerate(call.samples or [None]):
            parent_id = self._root_id
            if sample is not None and call.num_samples > 1:
                end_s = sample.ended_s if sample.ended_s >= 0 else call.total_s
                told = self._span("sample", parent_id, max(0.0, call.prepared_s), end_s, _of_sample(sample))
                parent_id = told.span_id
                yield told._replace(failure=sample.failure)
            stages = sample_spans(call, sample)
            # What was before the samples were begun is the same for all of them.
            shared = [stage for stage in stages if stage.end_s <= call.prepared_s]
            if not number:
                yield from (self._stage(stage, self._root_id) for stage in shared)
            yield from self._of_sample(sample, stages[len(shared) :], parent_id)

    def _of_sample(self, sample: SampleRecord | None, stages: list[Span], parent_id: int) -> Iterator[ToldSpan]:
        attempts: list[ToldSpan] = []
        for attempt in [] if sample is None else sample.attempts:
            end_s = attempt.ended_s if attempt.ended_s >= 0 else self._call.total_s
            told = self._span("attempt", parent_id, attempt.submitted_s, end_s, _of_attempt(attempt))
            told = told._replace(failure=attempt.failure)
            attempts.append(told)
            yield told
        for stage in stages:
            told = self._stage(stage, parent_id)
            # In nanoseconds, which are rounded alike.
            inside = [one for one in attempts if one.begin_ns <= told.begin_ns and told.end_ns <= one.end_ns]
            yield told._replace(parent_id=inside[-1].span_id) if inside and stage.name != "answer" else told

    def _stage(self, stage: Span, parent_id: int) -> ToldSpan:
        told = {"kvmesh.note": stage.note} if stage.note else {}
        return self._span(stage.name, parent_id, stage.begin_s, stage.end_s, told)

    def _span(
        self, name: str, parent_id: int, begin_s: float, end_s: float, told: dict[str, Any], span_id: int = 0
    ) -> ToldSpan:
        begin_ns = self._ns(begin_s)
        return ToldSpan(name, span_id or self._next_id(), parent_id, begin_ns, max(begin_ns, self._ns(end_s)), told)

    def _next_id(self) -> int:
        self._num += 1
        name = f"{self._call.request_id}/{self._num}".encode()
        return int.from_bytes(blake2b(name, digest_size=_ID_BYTES).digest()) or 1

    def _ns(self, at_s: float) -> int:
        # Microseconds: a float of the present time has no more, and records have less.
        return round((self._call.at + at_s) * 1e6) * 1000


def _of_call(call: CallRecord) -> dict[str, Any]:
    told = {
        "http.request.method": "POST",
        "http.route": call.route,
        "http.response.status_code": call.status,
        "error.type": call.code,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.response.finish_reasons": tuple(filter(None, call.finish.split(","))),
        "kvmesh.request_id": call.request_id,
        "kvmesh.client_id": call.client_id,
        "kvmesh.key": call.key,
        "kvmesh.cached_tokens": call.cached_tokens,
        "kvmesh.samples": call.num_samples,
        "kvmesh.attempts": call.attempts,
        "kvmesh.first_token_s": call.first_token_s,
        "kvmesh.stall_s": call.stall_s,
    }
    return {name: value for name, value in told.items() if value not in ("", (), -1.0)}


def _of_sample(sample: SampleRecord) -> dict[str, Any]:
    told = {
        "kvmesh.request_id": sample.request_id,
        "gen_ai.usage.output_tokens": sample.output_tokens,
        "kvmesh.cached_tokens": sample.cached_tokens,
        "kvmesh.finish": sample.finish,
    }
    return {name: value for name, value in told.items() if value != ""}


def _of_attempt(attempt: AttemptRecord) -> dict[str, Any]:
    told = {
        "kvmesh.attempt": attempt.attempt,
        "kvmesh.scheduler": attempt.scheduler,
        "kvmesh.epoch": attempt.epoch,
        "kvmesh.prefill": attempt.prefill,
        "kvmesh.detokenizer": attempt.detokenizer,
        "error.type": attempt.failure,
        "kvmesh.why": attempt.why,
    }
    return {name: value for name, value in told.items() if value != ""}
