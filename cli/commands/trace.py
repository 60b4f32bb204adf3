"""`meshctl trace`: what a call waited for, of a running mesh or, from its request logs, of one that has ended."""

import sys
import time
from typing import Any, Final, Literal, NamedTuple

import msgspec

from cli.client import RunningMesh, find_mesh
from cli.errors import NotRunning
from cli.exit_codes import ExitCode
from cli.output import print_json, print_table
from cli.supervisor.kept.cut_calls import LEFT_BEHIND, dead_gateways, read_cut_calls
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.trace.chrome import events
from cli.trace.lines import newest, read_calls
from cli.trace.notes import placed, read_notes
from cli.trace.pages import summary
from cli.trace.text import HEADER, detail, row, story
from cli.trace.unknown import unknown_call
from nodes.call_spans import sample_spans
from nodes.gateway.records.open_calls import open_calls_path
from nodes.protocol.records import ActorNotes, CallRecord, CallsFound, FindCalls, FindNotes, NotesFound, is_meant
from nodes.protocol.stores import FatesFound, FindFates, PromptFate

_POLL_S: Final = 0.5
"""A gateway keeps a thousand calls, so at 2,000 a second none is missed; each look asks all gateways."""
_TIMEOUT_S: Final = 6.0
"""The supervisor asks other hosts' supervisors for 2 s, who ask their gateways for 2 s."""


class Wanted(NamedTuple):
    """Which calls: by name, or the `last`, or the `slowest`, so many of them; one of the three."""

    name: str = ""
    last: int = 0
    slowest: int = 0


def trace(mesh: str, wanted: Wanted, output: Literal["text", "json", "chrome"], *, follow: bool) -> ExitCode:
    """Print them. Raises NotRunning, BadManifest, WrongUsage."""
    query = FindCalls(name=wanted.name, last=wanted.last, slowest=wanted.slowest, whole_mesh=True)
    directory = MeshDirectory(mesh)
    try:
        running: RunningMesh | None = find_mesh(mesh)
    except NotRunning:
        # It may have ended; what it has written down is still there.
        if follow or not directory.requests.is_dir():
            raise
        running = None
    if follow:
        assert running is not None, "raised above"
        return _follow(running, output)
    if running is not None:
        found = running.ask(query, CallsFound, _TIMEOUT_S)
    else:
        calls = newest([*read_calls(directory.requests, query), *_cut_calls(directory, query)], query)
        found = CallsFound(calls=newest(calls, query), num=len(calls))
        sys.stderr.write(f"{mesh} is not running: this is what its request logs on this host have\n")
    notes = _notes(running, directory, found.calls)
    pages = _fates(running, found.calls)
    # The rest of a host that does not answer is named by it already.
    for name in [*found.silent, *notes.silent]:
        sys.stderr.write(f"{name} does not answer, so what only it knows is missing\n")
    return _show(found, notes.actors, summary(pages), wanted, output)


def _fates(running: RunningMesh | None, calls: list[CallRecord]) -> list[PromptFate]:
    """What became of the pages of a call that is shown by itself, as long as its schedulers live."""
    if len(calls) != 1 or running is None:
        return []
    ids = [calls[0].request_id, *(sample.request_id for sample in calls[0].samples)]
    return running.ask(FindFates(request_ids=ids), FatesFound, _TIMEOUT_S).fates


def _notes(running: RunningMesh | None, directory: MeshDirectory, calls: list[CallRecord]) -> NotesFound:
    """What was noted of a call that is shown by itself; of a list of them nothing."""
    if len(calls) != 1:
        return NotesFound(actors=[])
    # What its gateway noted of all samples goes by the name of the call.
    ids = [calls[0].request_id, *(sample.request_id for sample in calls[0].samples)]
    if running is None:
        return NotesFound(actors=read_notes(directory.traces, ids, calls[0].host))
    return running.ask(FindNotes(request_ids=ids, whole_mesh=True), NotesFound, _TIMEOUT_S)


def _cut_calls(directory: MeshDirectory, query: FindCalls) -> list[CallRecord]:
    """Of gateways that were killed with their supervisor: it would have written their lines, as the next one does."""
    found = [
        call
        for gateway in dead_gateways(directory.requests)
        for call in read_cut_calls(
            open_calls_path(directory.requests, *gateway), directory.traces, gateway, LEFT_BEHIND
        )
    ]
    if not query.name:
        return found
    return [call for call in found if is_meant(call.request_id, call.client_id, call.traceparent, query.name)]


def _show(
    found: CallsFound,
    notes: list[ActorNotes],
    pages: list[str],
    wanted: Wanted,
    output: Literal["text", "json", "chrome"],
) -> ExitCode:
    calls = found.calls
    if output == "chrome":
        print_json(events(calls, placed(calls[0], notes) if len(calls) == 1 else []))
    elif output == "json":
        print_json([_entry(call) | _noted(call, notes) for call in calls])
    elif len(calls) == 1:
        sys.stdout.write("\n".join([*story(calls[0]), *pages, *detail(calls[0], notes)]) + "\n")
    elif calls:
        print_table(HEADER, [row(call) for call in calls])
        if found.num > len(calls) and wanted.name:
            sys.stdout.write(f"({found.num - len(calls)} more have this name)\n")
    if calls:
        return ExitCode.OK
    if wanted.name:
        raise unknown_call(wanted.name)
    if output == "text":
        sys.stdout.write("no call has ended yet\n")
    return ExitCode.OK


def _noted(call: CallRecord, notes: list[ActorNotes]) -> dict[str, Any]:
    return {"notes": [note._asdict() for note in placed(call, notes)]} if notes else {}


def _follow(running: RunningMesh, output: Literal["text", "json", "chrome"]) -> ExitCode:
    after: dict[str, int] = {}
    try:
        while True:
            found = running.ask(FindCalls(follows=True, after=after, whole_mesh=True), CallsFound, _TIMEOUT_S)
            after |= found.ended
            # In one line each, whatever the width: what follows is mostly piped into grep.
            for call in found.calls:
                text = msgspec.json.encode(_entry(call)).decode() if output == "json" else "  ".join(row(call))
                sys.stdout.write(text + "\n")
            if found.num > len(found.calls):
                sys.stdout.write(f"({found.num - len(found.calls)} more)\n" if output == "text" else "")
            sys.stdout.flush()
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return ExitCode.OK


def _entry(call: CallRecord) -> dict[str, Any]:
    """Every key is there in every entry, defaults too, and the spans of each sample that is told."""
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(call))
    spans = {
        (call if sample is None else sample).request_id: [span._asdict() for span in sample_spans(call, sample)]
        for sample in call.samples or [None]
    }
    return {**{name: getattr(call, name) for name in CallRecord.__struct_fields__}, **fields, "spans": spans}
