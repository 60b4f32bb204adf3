"""`meshctl logs`: what actors wrote, in one stream in order of time; of all hosts while they run, else of this one.

This host's files are read directly, those of other hosts through their supervisors:

    meshctl --ListLogs, ReadLogs--> own supervisor --the same, 2 s--> supervisor of another host
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import Final, Literal, NamedTuple

import msgspec

from cli.client import ASK_TIMEOUT_S, Ask, Reply, connected, find_mesh, not_running
from cli.errors import CliError, NotRunning, WrongUsage
from cli.exit_codes import ExitCode
from cli.log_lines import LogLine, choose, parse_since, read_lines, to_json, to_text
from cli.plan.faults import unknown_name
from cli.protocol import ListLogs, LogList, LogPart, LogParts, ReadLogs
from cli.supervisor.kept.log_files import log_roles, read_logs
from cli.supervisor.kept.mesh_directory import MeshDirectory
from mesh.wire.message import Message

_POLL_S: Final = 0.2
"""Lines look immediate to whoever reads along; each host is asked five times a second."""
_LOOK_S: Final = 2.0
"""How often it looks for hosts that have joined since, and for actors that are new on them."""
_DEFAULT_LINES: Final = 50


class Wanted(NamedTuple):
    """Which lines: of these actors or roles (none: of all), the last `num_lines`, from `since` on, from `level` up."""

    names: tuple[str, ...] = ()
    num_lines: int | None = None
    since: str | None = None
    level: str = "debug"


def logs(name: str, wanted: Wanted, *, follow: bool, output: Literal["text", "json"] | None) -> ExitCode:
    """Print the last lines, and with `follow` what comes after. Raises NotRunning if there is no such log."""
    directory = MeshDirectory(name)
    if wanted.since is None and wanted.num_lines is None:
        wanted = wanted._replace(num_lines=_DEFAULT_LINES)
    shown = _Shown(wanted, as_text=output == "text" if output else sys.stdout.isatty())
    # Of files that somebody else has moved, as logrotate does, the predecessors are there.
    if not any(directory.logs.glob("*.log*")):
        error = not_running(name)
        raise NotRunning(f"there are no logs of a mesh {name!r}", why=error.why, do=error.do)
    with suppress(KeyboardInterrupt):
        asyncio.run(_show(directory, wanted, shown, follow=follow))
    return ExitCode.OK


async def _show(directory: MeshDirectory, wanted: Wanted, shown: "_Shown", *, follow: bool) -> None:
    async with AsyncExitStack() as stack:
        ask = _Supervisor(directory, stack)
        # Whole files are read only if a filter may leave little of them.
        enough = wanted.num_lines if wanted.since is None and wanted.level == "debug" else None
        sources: list[_Here | _There] = [_Here(directory)]
        if directory.host:
            try:
                others = (await ask(ListLogs(), LogList)).hosts
            except CliError as error:
                sys.stderr.write(f"showing only this host's logs: {error.what}\n")
            else:
                sources += [_There(ask, host) for host in others]
        hosts = [_HostLogs(source, wanted.names, enough) for source in sources]
        await asyncio.gather(*(host.choose() for host in hosts))
        _require(directory.mesh, wanted.names, {id_: role for host in hosts for id_, role in host.roles.items()})
        shown.width = max((len(actor) for host in hosts for actor in host.chosen), default=0)
        first = await asyncio.gather(*(host.new_lines(is_last=not follow) for host in hosts))
        shown.begin([line for lines in first for line in lines])

        if follow:
            await asyncio.gather(
                *(_go_on(host, shown) for host in hosts), _look_for_hosts(ask, directory, hosts, shown)
            )


async def _go_on(host: "_HostLogs", shown: "_Shown") -> None:
    while True:
        await asyncio.sleep(_POLL_S)
        await host.choose()
        shown.add(await host.new_lines())


async def _look_for_hosts(ask: Ask, directory: MeshDirectory, hosts: list["_HostLogs"], shown: "_Shown") -> None:
    known = {host.name for host in hosts}
    followed: list[asyncio.Task[None]] = []
    while True:
        await asyncio.sleep(_LOOK_S)
        for task in followed:
            if task.done():
                # It goes on for ever, except for an error that ends everything: nobody reads the output any more.
                task.result()
        # A mesh of one host has no others, but may be followed by one of several.
        if not directory.host:
            continue
        # This host's supervisor may be away for a moment, or still to come, and is asked again.
        with suppress(CliError):
            for name in (await ask(ListLogs(), LogList)).hosts:
                if name not in known:
                    known.add(name)
                    # Kept here, since the loop does not keep tasks alive; they end with the loop.
                    followed.append(asyncio.create_task(_go_on(hosts[0].joined(_There(ask, name)), shown)))


class _Supervisor:
    """Asks this host's supervisor over one connection, which is made at the first question and anew after a failure.

    So whoever follows logs before a mesh is up, or over its restart, hears of its other hosts too.
    """

    def __init__(self, directory: MeshDirectory, stack: AsyncExitStack) -> None:
        self._directory = directory
        self._stack = stack
        # Hosts are polled side by side: only one of them connects.
        self._connecting = asyncio.Lock()
        self._ask: Ask | None = None

    async def __call__(self, question: Message, answer_type: type[Reply], timeout_s: float = ASK_TIMEOUT_S, /) -> Reply:
        async with self._connecting:
            if self._ask is None:
                self._ask = await self._stack.enter_async_context(connected(find_mesh(self._directory.mesh)))
            ask = self._ask
        try:
            return await ask(question, answer_type, timeout_s)
        except NotRunning:
            if self._ask is ask:
                self._ask = None
                await self._stack.aclose()
            raise


class _Shown:
    """Prints chosen lines. Raises WrongUsage if `since` is no time."""

    def __init__(self, wanted: Wanted, *, as_text: bool) -> None:
        self.width = 0
        self._since = parse_since(wanted.since, datetime.now()) if wanted.since is not None else 0.0
        self._wanted = wanted
        self._as_text = as_text
        self._colours = as_text and sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def begin(self, lines: list[LogLine]) -> None:
        chosen = choose(lines, self._since, self._wanted.level)
        num_lines = self._wanted.num_lines
        self._print(chosen if num_lines is None else chosen[len(chosen) - min(num_lines, len(chosen)) :])

    def add(self, lines: list[LogLine]) -> None:
        self._print(choose(lines, self._since, self._wanted.level))

    def _print(self, lines: list[LogLine]) -> None:
        for line in lines:
            text = to_text(line, self.width, colours=self._colours) if self._as_text else to_json(line)
            sys.stdout.write(text + "\n")
        sys.stdout.flush()


class _HostLogs:
    """The logs of one host that are shown: those of the actors `chosen`, each from its last lines on."""

    def __init__(self, source: "_Here | _There", names: tuple[str, ...], enough: int | None) -> None:
        self.roles: dict[str, str] = {}
        self.chosen: list[str] = []
        self._source = source
        self._names = names
        self._enough = enough
        self._places: dict[str, int] = {}
        self._rests: dict[str, bytes] = {}
        self._is_away = False
        self._chosen_at = float("-inf")

    @property
    def name(self) -> str:
        return self._source.host

    def joined(self, source: "_There") -> "_HostLogs":
        """The same for a host that has just joined: its files may be of earlier meshes, so only their last lines."""
        return _HostLogs(source, self._names, self._enough or _DEFAULT_LINES)

    async def choose(self) -> None:
        """Find out which logs there are: now and then, since a host may come back with other actors.

        A host that is away is asked again the next time.
        """
        now = asyncio.get_running_loop().time()
        if self.roles and now - self._chosen_at < _LOOK_S:
            return
        self._chosen_at = now
        try:
            self.roles = (await self._source.ask(ListLogs(), LogList)).roles
        except CliError as error:
            self._away(error)
        is_wanted = {*self._names}.intersection
        self.chosen = [id_ for id_, role in self.roles.items() if not self._names or is_wanted((id_, role))]

    async def new_lines(self, *, is_last: bool = False) -> list[LogLine]:
        """What was written since the last time; a line that is still being written comes whole the next time."""
        new: dict[str, LogPart] = {}
        asked = self.chosen
        while asked:
            places = {actor_id: self._places.get(actor_id) for actor_id in asked}
            try:
                parts = (await self._source.ask(ReadLogs(places=places, num_lines=self._enough), LogParts)).parts
            except CliError as error:
                self._away(error)
                break
            self._back()
            for actor_id, part in parts.items():
                self._places[actor_id] = part.place
                before = new[actor_id].content if actor_id in new else self._rests.pop(actor_id, b"")
                new[actor_id] = msgspec.structs.replace(part, content=before + part.content)
            asked = [actor_id for actor_id, part in parts.items() if part.more]
        lines: list[LogLine] = []
        for actor_id, part in new.items():
            whole, newline, rest = part.content.rpartition(b"\n")
            if not is_last:
                self._rests[actor_id] = rest
            # Not splitlines, which breaks at characters that JSON leaves as they are.
            texts = (part.content if is_last else whole + newline).decode(errors="replace").split("\n")
            lines += read_lines(actor_id, texts, part.modified_at)
        return lines

    def _away(self, error: CliError) -> None:
        if not self._is_away:
            sys.stderr.write(f"the logs of host {self._source.host} are left out: {error.why}\n")
        self._is_away = True

    def _back(self) -> None:
        if self._is_away:
            sys.stderr.write(f"host {self._source.host} answers again\n")
        self._is_away = False


class _Here(NamedTuple):
    """The files of this host."""

    directory: MeshDirectory

    @property
    def host(self) -> str:
        return self.directory.host

    async def ask(self, question: ListLogs | ReadLogs, answer_type: type[Reply]) -> Reply:
        here = self.directory
        answer = read_logs(here, question) if isinstance(question, ReadLogs) else LogList(roles=log_roles(here))
        assert isinstance(answer, answer_type)
        return answer


class _There(NamedTuple):
    """The files of another host, through its supervisor."""

    connection: Ask
    host: str

    async def ask(self, question: ListLogs | ReadLogs, answer_type: type[Reply]) -> Reply:
        return await self.connection(msgspec.structs.replace(question, host=self.host), answer_type)


def _require(mesh: str, names: tuple[str, ...], roles: dict[str, str]) -> None:
    """Raises WrongUsage for a name that is no actor's and no role's."""
    for name in names:
        if name not in roles and name not in roles.values():
            fault = unknown_name(name, [*roles.values(), *roles], "actor or role")
            raise WrongUsage(f"there is no log of {name} in mesh {mesh!r}", why=fault.why, do=fault.do)
