"""The calls that a gateway had when it died: each gets its line in the request log, told by what outlived the gateway.

Its names are in the file of open calls (`nodes/gateway/records/open_calls.py`), its times in the gateway's trace ring.
Whatever other actors noted of it, `meshctl trace` shows as of any call.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from mesh.address import Address
from mesh.runtime.trace_ring import Note, key_of, read_trace
from nodes.gateway.records.line_file import LineFile
from nodes.gateway.records.open_calls import SUFFIX, open_calls_path, read_open_calls
from nodes.protocol.records import MAX_SAMPLES, NOT_YET, AttemptRecord, CallRecord, DeathRecord, SampleRecord, since
from nodes.trace_notes import Noted

GATEWAY_DIED: Final = "gateway_died"
"""The code of a call whose gateway ended before it, and of its last attempt."""
NOT_TOLD: Final = "not_told"
"""Why an attempt before that came to nothing: only the gateway knew."""
LEFT_BEHIND: Final = "it ended with its supervisor"
"""The reason where no supervisor was there to see it."""


def end_calls(requests: Path, traces: Path, dead: Address, reason: str, now: float | None = None) -> int:
    """Write the lines of a dead gateway's calls and forget its file. How many there were. Raises OSError.

    `now`: when it died, by its host's clock; None: when it noted something last.
    """
    path = open_calls_path(requests, dead.actor_id, dead.epoch)
    calls = read_cut_calls(path, traces, dead, reason, now)
    if calls:
        # All in one write: the next incarnation appends to this file too, and turns it when it is full.
        lines = LineFile(requests / f"{dead.actor_id}.jsonl", sys.maxsize)
        try:
            lines.write(b"".join(msgspec.json.encode(call) + b"\n" for call in calls))
        finally:
            lines.close()
    path.unlink(missing_ok=True)
    return len(calls)


def dead_gateways(requests: Path) -> list[Address]:
    """Those whose files are here; to be asked where no gateway of the mesh lives."""
    names = [path.name.removesuffix(SUFFIX).rpartition(".") for path in sorted(requests.glob(f"*{SUFFIX}"))]
    return [Address(actor_id, int(epoch)) for actor_id, _, epoch in names if epoch.isdecimal()]


def read_cut_calls(path: Path, traces: Path, dead: Address, reason: str, now: float | None = None) -> list[CallRecord]:
    """The calls of one such file as records; none if it cannot be read."""
    content = _read(path)
    # Most gateways that die have no call: their rings need not be looked through.
    calls = read_open_calls(content) if content else []
    if not calls:
        return []
    ring = read_trace(_read(traces / f"{dead.actor_id}.{dead.epoch}"), dead.actor_id)
    notes = [] if ring is None else ring.notes
    if now is None:
        now = max((note.at for note in notes), default=0.0)
    of_key: dict[int, list[Note]] = {}
    for note in notes:
        of_key.setdefault(note.key, []).append(note)
    return [rebuilt(call, of_key, dead, reason, max(now, call.clock_s)) for call in calls]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def rebuilt(call: CallRecord, notes: dict[int, list[Note]], dead: Address, reason: str, now: float) -> CallRecord:
    """`call`, of which there are the names, completed by what its gateway noted, in order, by key of what name."""
    call.code, call.total_s = GATEWAY_DIED, since(call.clock_s, now)
    call.deaths = [DeathRecord(actor=dead.actor_id, at_s=call.total_s, reason=reason)]
    prepared = [note for note in notes.get(key_of(call.request_id), []) if note.kind == Noted.PREPARED]
    if prepared:
        call.prepared_s = since(call.clock_s, prepared[-1].at)
        call.tokenize_s, call.prompt_tokens = sum(note.b for note in prepared) / 1e6, sum(note.a for note in prepared)
    for number in range(MAX_SAMPLES):
        request_id = f"{call.request_id}-{number}"
        if attempts := _attempts(call.clock_s, notes.get(key_of(request_id), [])):
            last = attempts[-1]
            last.ended_s, last.failure, last.why = call.total_s, GATEWAY_DIED, reason
            call.samples.append(_sample(request_id, attempts))
            call.num_samples += 1
            call.first_token_s = max(call.first_token_s, call.samples[-1].first_token_s)
            call.attempts = max(call.attempts, 1 + last.attempt)
    return call


def _sample(request_id: str, attempts: list[AttemptRecord]) -> SampleRecord:
    first_s, ended_s = min((one.first_s for one in attempts if one.first_s >= 0), default=NOT_YET), attempts[-1].ended_s
    return SampleRecord(
        request_id=request_id,
        first_token_s=first_s,
        # When its last token came, nobody knows: a pause before the death is not told.
        last_token_s=ended_s if first_s >= 0 else NOT_YET,
        ended_s=ended_s,
        failure=GATEWAY_DIED,
        attempts=attempts,
    )


def _attempts(begin: float, notes: Iterable[Note]) -> list[AttemptRecord]:
    found: list[AttemptRecord] = []
    for note in notes:
        at_s = since(begin, note.at)
        last = found[-1] if found else None
        if note.kind == Noted.SUBMITTED and (last is None or note.a != last.attempt or last.ended_s >= 0):
            if last is not None and last.ended_s < 0:
                last.ended_s, last.failure = at_s, NOT_TOLD
            found.append(AttemptRecord(attempt=note.a, scheduler="", submitted_s=at_s))
        elif last is None:
            continue
        elif note.kind == Noted.ANSWERED and note.a == last.attempt and last.accepted_s < 0:
            if note.b:
                last.accepted_s = at_s
            else:
                last.ended_s, last.failure = at_s, NOT_TOLD
        elif note.kind == Noted.FIRST and last.first_s < 0:
            last.first_s = at_s
    return found
