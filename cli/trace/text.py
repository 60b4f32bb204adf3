"""Calls as people read them in a terminal: a list of them, or one with its timeline. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from cli.trace.notes import placed
from nodes.call_spans import Span, sample_spans
from nodes.protocol.records import ActorNotes, CallRecord, SampleRecord

_BAR: Final = 40
"""Columns of a timeline: beside names and numbers it fits a terminal of 100."""
HEADER: Final = ("REQUEST", "AT", "ROUTE", "STATUS", "TOOK", "FIRST", "TOKENS", "TRIES", "END", "CALLED")


def seconds(value: float) -> str:
    """`1.234 s` or `12.3 ms`; `-` for what has not come."""
    if value < 0:
        return "-"
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def row(call: CallRecord) -> list[str]:
    """A line of the list of calls, by `HEADER`."""
    tokens = f"{call.prompt_tokens}+{call.output_tokens}"
    ended = call.code or call.finish or ("-" if call.status else "running")
    status = str(call.status or "-")
    times = [seconds(call.total_s), seconds(call.first_token_s)]
    at = datetime.fromtimestamp(call.at).strftime("%H:%M:%S") if call.at else "-"
    return [call.request_id, at, call.route, status, *times, tokens, str(call.attempts), ended, call.client_id or "-"]


def story(call: CallRecord) -> list[str]:
    """One call, with the timeline of each of its samples that are told."""
    at = datetime.fromtimestamp(call.at).strftime("%Y-%m-%d %H:%M:%S") if call.at else "-"
    # One whose gateway died has a code and no status: what of its answer was written, nobody knows.
    state = f"status {call.status}" if call.status else "not answered whole" if call.code else "running"
    lines = [f"{call.request_id}  {call.route}  {state}{f', {call.code}' if call.code else ''}"]
    lines.append(
        f"  at {at} at {call.gateway or '-'}, took {seconds(call.total_s)}, first {seconds(call.first_token_s)}"
    )
    cached = f" ({call.cached_tokens} cached)" if call.cached_tokens else ""
    num = f", {call.num_samples} samples" if call.num_samples > 1 else ""
    finish = f", finish {call.finish}" if call.finish else ""
    lines.append(f"  {call.prompt_tokens} prompt tokens{cached}, {call.output_tokens} output tokens{num}{finish}")
    named = {"key": call.key, "x-request-id": call.client_id, "traceparent": call.traceparent}
    lines += [f"  {name} {value}" for name, value in named.items() if value]
    if call.sampled > 1:
        lines.append(f"  of {call.sampled} such calls one has a line in the request log")
    for sample in call.samples or [None]:
        if sample is not None and call.num_samples > 1:
            lines.append(
                f"  {sample.request_id}, {sample.output_tokens} tokens, {sample.finish or sample.failure or '-'}"
            )
        lines += [_line(span, call.total_s) for span in sample_spans(call, sample)]
        lines += _failures(sample)
    if call.num_samples > len(call.samples):
        lines.append(f"  {call.num_samples - len(call.samples)} more samples are not kept")
    lines += [f"  at {seconds(death.at_s)} {death.actor} died: {death.reason}" for death in call.deaths]
    return lines


def detail(call: CallRecord, actors: Sequence[ActorNotes]) -> list[str]:
    """What actors noted of it, in order of time, and what is not known any more."""
    notes = placed(call, actors)
    if not notes:
        return ["  nothing is noted of it any more"]
    error_s = max(note.error_s for note in notes)
    lines = [f"  noted, times of other hosts within {seconds(error_s)}:" if error_s else "  noted:"]
    lines += [f"    {seconds(note.at_s):>10}  {note.actor_id:<22} {note.text}" for note in notes]
    return lines + [
        f"  {one.num_lost} older notes of {one.actor_id}.{one.epoch} were written over"
        for one in actors
        if one.num_lost
    ]


def _line(span: Span, total_s: float) -> str:
    begin = round(_BAR * span.begin_s / total_s) if total_s else 0
    width = max(1, round(_BAR * span.end_s / total_s) - begin) if total_s else 0
    # A span too short to be seen is shown all the same, also at the very end.
    begin = min(begin, _BAR - width)
    bar = f"{' ' * begin}{'█' * width}".ljust(_BAR)
    return f"    {span.name:<16}{seconds(span.took_s):>10}  |{bar}|  {span.note}".rstrip()


def _failures(sample: SampleRecord | None) -> list[str]:
    attempts = sample.attempts if sample is not None else []
    return [
        f"    attempt {one.attempt} at {one.scheduler} ended at {seconds(one.ended_s)}: {one.failure}"
        + (f" ({one.why})" if one.why else "")
        for one in attempts
        if one.failure
    ]
