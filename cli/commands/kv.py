"""`meshctl kv ls`, `stats`, `why` and `flush`: pages that agents keep on disk, and what schedulers make of them."""

import sys
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
import typer

from cli.client import find_mesh
from cli.errors import WrongUsage
from cli.exit_codes import ExitCode
from cli.output import duration, print_json, print_table
from cli.supervisor.hosts.store_relay import FLUSH_S
from cli.trace.pages import story
from cli.trace.unknown import unknown_call
from nodes.amounts import amount
from nodes.protocol.records import MAX_CALLS, CallsFound, FindCalls
from nodes.protocol.stores import (
    AgentStores,
    FatesFound,
    FindFates,
    FlushStores,
    ListStores,
    StoreFacts,
    StoreList,
    StoreReader,
    StoresFlushed,
)

_ASK_S: Final = 6.0
"""The supervisor asks agents for 2 s and schedulers for 1 s."""
_HEADER: Final = ("AGENT", "STORE", "PAGES", "OF", "DISK", "USED", "RANKS", "LAYOUT", "NUMERICS")
_READERS: Final = ("SCHEDULER", "READS", "COMPUTES", "ASKED", "FOUND", "READ", "RESTORES", "FAILED", "DEARER")
_NONE: Final = "no host keeps KV pages on disk: start the mesh with --kv-disk DIR --kv-disk-size BYTES\n"


def ls(name: str, output: str) -> ExitCode:
    """Print the stores. Raises NotRunning, CliError."""
    found = _ask(name)
    if output == "json":
        print_json([_entry(agent, store) for agent in found.agents for store in agent.stores])
        return ExitCode.OK
    rows = [_row(agent.agent, store) for agent in found.agents for store in agent.stores]
    if rows:
        print_table(_HEADER, rows)
    return ExitCode.OK


def stats(name: str, output: str) -> ExitCode:
    """Print what became of pages. Raises NotRunning, CliError."""
    found = _ask(name)
    if output == "json":
        print_json(_whole(found))
        return ExitCode.OK
    for agent in found.agents:
        sys.stdout.write("".join(f"{line}\n" for line in _story(agent)))
    if found.readers:
        sys.stdout.write("\n")
        print_table(_READERS, [_reads(reader) for reader in found.readers])
    return ExitCode.OK


def why(name: str, request: str, output: str) -> ExitCode:
    """Print what became of the pages of a call's prompts. Raises NotRunning, WrongUsage, CliError."""
    mesh = find_mesh(name)
    query = FindCalls(name=request, last=0 if request else 1, whole_mesh=True)
    calls = mesh.ask(query, CallsFound, _ASK_S)
    if not calls.calls:
        raise unknown_call(request)
    # Newest first: a name that a client uses again means its last call.
    (call, *more) = calls.calls[::-1]
    # A call that has a sample for each of its requests, or is its own.
    # Both are asked for, as only schedulers know which; and no more than one message may have.
    ids = [call.request_id, *(sample.request_id for sample in call.samples)]
    found = mesh.ask(FindFates(request_ids=ids[:MAX_CALLS]), FatesFound, _ASK_S)
    for silent in [*calls.silent, *found.silent]:
        sys.stderr.write(f"{silent} does not answer, so what only it knows is missing\n")
    if more:
        sys.stderr.write(f"({len(more)} more have this name; this is the last one)\n")
    if output == "json":
        print_json(_whole(found.fates))
        return ExitCode.OK
    for fate in found.fates:
        sys.stdout.write("".join(f"{line}\n" for line in story(fate)))
    if not found.fates:
        sys.stderr.write(f"no scheduler remembers {call.request_id}: each keeps its last 1,000 prompts\n")
    return ExitCode.OK


def flush(name: str, folders: list[str], *, yes: bool, output: str) -> ExitCode:
    """Forget pages, once that is confirmed. Raises NotRunning, WrongUsage, CliError, typer.Abort."""
    mesh = find_mesh(name)
    if not yes:
        _ask_first(_ask(name), folders)
    # A second more than the supervisor waits for its agents, so that it says who is silent, and not we that it is.
    answer = mesh.ask(FlushStores(folders=folders), StoresFlushed, FLUSH_S + 1.0)
    if answer.note:
        sys.stderr.write(f"{answer.note}\n")
    if output == "json":
        print_json([msgspec.structs.asdict(one) for one in answer.flushed])
        return ExitCode.OK
    for one in answer.flushed:
        sys.stdout.write(f"{one.agent} has forgotten {one.num_pages:,} pages of {one.folder}\n")
    if not answer.flushed:
        sys.stderr.write("no store is open, so there is nothing to forget\n")
    return ExitCode.OK


def _ask(name: str) -> StoreList:
    found = find_mesh(name).ask(ListStores(), StoreList, _ASK_S)
    for silent in found.silent:
        sys.stderr.write(f"{silent} does not answer, so what only it knows is missing\n")
    if not found.agents and not found.silent:
        sys.stderr.write(_NONE)
    return found


def _ask_first(found: StoreList, folders: list[str]) -> None:
    """Returns if the flush is wanted. Raises WrongUsage where nobody can be asked, typer.Abort if it is not."""
    # Only open ones: a folder that no agent has open may be another mesh's, whose pages are not ours to forget.
    for agent in found.agents:
        for store in agent.stores:
            if store.is_open and (not folders or store.folder in folders):
                sys.stderr.write(f"{agent.agent} will forget {store.num_pages:,} pages of {store.folder}.\n")
    if not sys.stdin.isatty():
        why, do = "there is no terminal to ask whether it is wanted", "add --yes, if it is"
        raise WrongUsage("pages are not forgotten without being told", why=why, do=do)
    typer.confirm("Forget them?", abort=True, err=True)


def _row(agent: str, store: StoreFacts) -> list[str]:
    state = "off" if store.why_off else "" if store.is_loaded else "reading"
    counts = [state or f"{store.num_pages:,}", f"{store.num_slots:,}"]
    # Below zero: an installed store of which nothing was found yet; it has no file whose time of change would tell.
    used = "-" if store.used_s < 0 else f"{duration(store.used_s)} ago"
    pages = counts if store.is_open else ["not open", "-"]
    whose = [str(store.tp_size), store.layout[:12], store.numerics] if store.layout else ["-", "-", "-"]
    return [agent, store.folder, *pages, amount(store.num_bytes), used, *whose]


def _entry(agent: AgentStores, store: StoreFacts) -> dict[str, Any]:
    """Every key is there in every entry, defaults too."""
    return {"agent": agent.agent, "directory": agent.directory} | msgspec.structs.asdict(store)


def _whole(value: Any) -> Any:
    """Plain data in which every key is there, defaults too."""
    if isinstance(value, msgspec.Struct):
        return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    return [_whole(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value


def _story(agent: AgentStores) -> list[str]:
    """What one agent's stores did since it started."""
    # An installed store bounds itself, so it is told without a size; nor has it I/O of ours.
    is_disk = bool(agent.size_bytes)
    lines = [f"{agent.agent}: {agent.directory}" + f", {amount(agent.size_bytes)} at most" * is_disk]
    for store in agent.stores:
        if not store.is_open:
            continue
        counts = store.counts
        lines.append(
            f"  {store.folder}: {store.num_pages:,} of {store.num_slots:,} pages for {', '.join(store.groups)}, "
            f"{store.num_queued:,} wait to be written"
        )
        how = f"through the kernel's cache: {store.why_buffered}" if store.why_buffered else "direct"
        if is_disk:
            lines.append(f"    I/O is {how}")
        # One line, the worst: a store that is off has failed, and so has one that is only read.
        if store.why_off:
            lines.append(f"    off: {store.why_off}")
        elif store.why_read_only:
            lines.append(f"    only read: {store.why_read_only}")
        elif store.last_failure:
            lines.append(f"    the {'disk' if is_disk else 'store'}'s last failure: {store.last_failure}")
        lines.append(
            f"    asked for {counts['queried']:,} pages, had {counts['found']:,}; read {counts['read']:,}, "
            f"{counts['stale']:,} were gone, {counts['corrupt']:,} refused by checksum, "
            f"{_unsigned(counts)}"
            f"{counts['unreadable']:,} not read"
        )
        lines.append(f"    wrote {counts['written']:,} pages, gave up {counts['evicted']:,} for others")
    dropped = [f"{number:,} {reason}" for reason, number in agent.dropped.items() if number]
    lines.append(f"  not stored: {', '.join(dropped) or 'none that it was told of'}")
    return lines


def _unsigned(counts: Mapping[str, int]) -> str:
    """Of stores whose values are signed; a disk has none, nor what an agent of an earlier release tells."""
    return f"{counts['unsigned']:,} refused by signature, " if counts.get("unsigned") else ""


def _reads(reader: StoreReader) -> list[str]:
    rates = [(reader.pages_per_s, "pages/s"), (reader.tokens_per_s, "tokens/s")]
    counts = [reader.num_queried, reader.num_found, reader.num_restored]
    ends = [reader.num_done, reader.num_failed, reader.num_dearer]
    return [
        reader.scheduler,
        *(f"{rate:,.0f} {unit}" if rate else "-" for rate, unit in rates),
        *(f"{count:,}" for count in (*counts, *ends)),
    ]
