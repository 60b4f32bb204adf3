"""`meshctl top`: who is busy, in one screen that is drawn again each second; plain lines if it is piped."""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Generator
from typing import Any, Final

import msgspec

from cli.client import Ask, RunningMesh, connected, find_mesh
from cli.commands.ps import actor_fields
from cli.errors import CliError, NotRunning
from cli.exit_codes import ExitCode
from cli.output import print_json
from cli.protocol import ActorList, ListActors
from cli.supervisor.processes.by_pid import is_alive
from cli.top_screen import Memory, calls_section, head_lines, screen, sections
from nodes.protocol.records import MAX_CALLS, CallsFound, FindCalls

_REFRESH_S: Final = 1.0
"""Two heartbeats, with which figures come; each look asks the supervisors of all hosts, who ask their actors."""
_PSS_S: Final = 5.0
"""The kernel needs up to 20 ms of CPU for each actor's: asked for each second it would show in what is shown."""

_ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The other screen, as an editor does, without a cursor: what was on the terminal comes back when this ends."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_TO_LINE_END: Final = "\x1b[K"
_TO_SCREEN_END: Final = "\x1b[J"


def top(name: str, output: str, interval_s: float | None) -> ExitCode:
    """Show a mesh until Ctrl-C or its end; if it is piped, or as JSON, once, or each `interval_s`.

    Raises NotRunning or BadManifest.
    """
    mesh = find_mesh(name)
    on_screen = output == "table" and sys.stdout.isatty()
    if on_screen and interval_s is None:
        interval_s = _REFRESH_S
    with contextlib.suppress(KeyboardInterrupt), _other_screen() if on_screen else contextlib.nullcontext():
        asyncio.run(_look(mesh, output, interval_s, on_screen=on_screen))
    return ExitCode.OK


async def _look(running: RunningMesh, output: str, interval_s: float | None, *, on_screen: bool) -> None:
    memory, looked_s = Memory(), 0.0
    mesh: ActorList | None = None
    calls = CallsFound(calls=[])
    async with connected(running) as ask:
        while True:
            began_s = time.monotonic()
            with_pss = mesh is None or began_s - looked_s >= _PSS_S
            answer = await _asked(running, ask, with_pss=with_pss, has_shown=mesh is not None)
            if answer is None:
                # As it was: the next look says more, or that the supervisor is gone.
                assert mesh is not None
                silence = "the supervisor does not answer; this is what it said last"
                mesh = msgspec.structs.replace(mesh, notes=[silence, *(n for n in mesh.notes if n != silence)])
            else:
                if with_pss:
                    looked_s = began_s
                    memory.take(answer.actors)
                mesh = memory.filled(answer)
                calls = await _calls(ask)
            _show(mesh, calls, output, repeats=interval_s is not None, on_screen=on_screen)
            if interval_s is None:
                return
            await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))


async def _asked(running: RunningMesh, ask: Ask, *, with_pss: bool, has_shown: bool) -> ActorList | None:
    try:
        return await ask(ListActors(figures=True, whole_mesh=True, pss=with_pss), ActorList)
    except NotRunning:
        # A supervisor that is starved for a moment does not end a look that lasts for hours.
        if has_shown and is_alive(running.manifest.pid, running.manifest.start_time):
            return None
        raise


async def _calls(ask: Ask) -> CallsFound:
    try:
        return await ask(FindCalls(running=MAX_CALLS, whole_mesh=True), CallsFound)
    except CliError:
        # Actors were shown, which is what this is for; a supervisor of an older release knows no calls.
        return CallsFound(calls=[])


def _show(mesh: ActorList, calls: CallsFound, output: str, *, repeats: bool, on_screen: bool) -> None:
    if output == "json":
        document: dict[str, Any] = {
            "mesh": mesh.mesh, "url": mesh.url, "model": mesh.model, "ready": mesh.ready, "at": time.time(),
            "notes": mesh.notes, "silent": mesh.silent, "actors": [actor_fields(actor) for actor in mesh.actors],
            "calls": calls.calls,
        }  # fmt: skip
        if repeats:
            # A line each, as programs read what does not end.
            sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        else:
            print_json(document)
    else:
        width, height = shutil.get_terminal_size() if on_screen else (None, None)
        head = head_lines(mesh, time.strftime("%H:%M:%S"))
        lines = screen(head, [*sections(mesh, width), *calls_section(calls, width)], width, height)
        if on_screen:
            # Written over what is there, and in one piece: clearing it first would flicker.
            sys.stdout.write(_HOME + "\r\n".join(line + _TO_LINE_END for line in lines) + _TO_SCREEN_END)
        else:
            sys.stdout.write("\n".join([*lines, *([""] if repeats else []), ""]))
    sys.stdout.flush()


@contextlib.contextmanager
def _other_screen() -> Generator[None]:
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
