"""Calls as trace events, which Perfetto and Chrome's tracing page show (format: Trace Event Format). Pure."""

from collections.abc import Sequence
from typing import Any

from cli.trace.notes import PlacedNote
from nodes.call_spans import sample_spans
from nodes.protocol.records import CallRecord


def events(calls: Sequence[CallRecord], notes: Sequence[PlacedNote] = ()) -> dict[str, Any]:
    """One document: a process for each call, in it a thread for each sample; times in microseconds. `notes` are of the
    only call.
    """
    told: list[dict[str, Any]] = []
    first = min((call.at for call in calls), default=0.0)
    for pid, call in enumerate(calls, 1):
        at_us = (call.at - first) * 1e6
        told.append(
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{call.route} {call.request_id}"}}
        )
        for tid, sample in enumerate(call.samples or [None]):
            told += [
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": at_us + span.begin_s * 1e6,
                    "dur": span.took_s * 1e6,
                    "args": {"note": span.note},
                }
                for span in sample_spans(call, sample)
            ]
        told += [
            {"name": f"{death.actor} died", "ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": at_us + death.at_s * 1e6,
             "args": {"reason": death.reason}}
            for death in call.deaths
        ]  # fmt: skip
    told += [
        {"name": note.text, "ph": "i", "s": "t", "pid": 1, "tid": note.actor_id, "ts": note.at_s * 1e6}
        for note in notes
    ]
    return {"traceEvents": told, "displayTimeUnit": "ms"}
