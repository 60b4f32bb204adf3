"""The request logs of a host, read back: the calls of gateways that are gone, or that have forgotten them."""

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from nodes.protocol.records import MAX_CALLS, CallRecord, FindCalls, is_meant

_TAIL_BYTES: Final = 8 << 20
"""What is read of a file if not a name is looked for: some 10,000 calls, in a tenth of a second."""
_DECODER: Final = msgspec.json.Decoder(CallRecord)


def read_calls(folder: Path, query: FindCalls) -> list[CallRecord]:
    """The calls that have lines and are meant, `MAX_CALLS` at most; nothing of files that cannot be read."""
    found: list[CallRecord] = []
    for path in sorted(folder.glob("*.jsonl")):
        older = path.with_name(path.name + ".1")
        for file in (older, path):
            found += _chosen(file, query)
    return newest(found, query)


def newest(calls: Iterable[CallRecord], query: FindCalls) -> list[CallRecord]:
    """The calls that are meant, of those that several have found: in order of time, or the slowest one last."""
    # A gateway knows more of a call than its line does, if it still has it, so it is to be found first.
    first: dict[str, CallRecord] = {}
    for call in calls:
        first.setdefault(call.request_id, call)
    if query.slowest or query.running:
        # Of those that run, the slowest is the oldest.
        return heapq.nlargest(query.slowest or query.running, first.values(), key=lambda call: call.total_s)[::-1]
    in_order = sorted(first.values(), key=lambda call: call.at + call.total_s)
    return in_order[-(query.last or MAX_CALLS) :]


def _chosen(path: Path, query: FindCalls) -> list[CallRecord]:
    if query.follows or query.running:
        # What has a line has ended.
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0 if query.name else max(0, size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return []
    if query.name:
        calls = _decoded(_lines_with(content, query.name.encode()))
        meant = (one for one in calls if is_meant(one.request_id, one.client_id, one.traceparent, query.name))
        return [*meant][-MAX_CALLS:]
    # The first line of a tail is most likely half of one, which is passed over as any damaged one.
    calls = _decoded(content.split(b"\n"))
    return newest(calls, query) if query.slowest else [*calls][-query.last :]


def _lines_with(content: bytes, name: bytes) -> Iterator[bytes]:
    # The line of a sample's id has the id of its call, so what is looked for is without the number.
    wanted = name.rpartition(b"-")[0] if name.rpartition(b"-")[2].isdigit() else name
    at = content.find(wanted)
    while at >= 0:
        end = content.find(b"\n", at)
        end = len(content) if end < 0 else end
        yield content[content.rfind(b"\n", 0, at) + 1 : end]
        at = content.find(wanted, end)


def _decoded(lines: Iterable[bytes]) -> Iterator[CallRecord]:
    for line in lines:
        if line:
            try:
                yield _DECODER.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                # Half a line of a gateway that was killed, or of a full disk.
                continue
