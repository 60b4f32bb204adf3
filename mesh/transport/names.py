"""Names of hosts in tcp addresses, looked up before ZeroMQ sees them.

ZeroMQ looks a name up in the one thread that serves all sockets, and everything of the process stands still meanwhile:
of a container that is gone a name server may say so after 5 s or more, and every actor that dialed one was killed for
its silence. A look-up is a thread of its own; who asks for a name that is being looked up waits for the same answer.

A mesh that runs outlives its name server: where that is silent or out of order, the address that a name had before is
taken. A host seldom comes back under another, and then no welcome comes from the old one, and it is dialed again.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from typing import Final

_TCP: Final = "tcp://"

_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 2.0
# Of one name, and every actor of every host may ask for it. Resolvers give up after 10 s or 20 s.
_MAX_ASKING: Final = 8
_MAX_KNOWN: Final = 4096


def name_in(where: str) -> str:
    """The name of a host that has to be looked up before `where` is dialed; "" where there is none."""
    if not where.startswith(_TCP):
        return ""
    host = where.removeprefix(_TCP).rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return ""


def with_address(where: str, address: str) -> str:
    """`where` with an IP address in the place of its name."""
    return f"{_TCP}{f'[{address}]' if ':' in address else address}:{where.rpartition(':')[2]}"


class _Search:
    """What is being asked about one name. `found` is of those who wait now; threads of earlier ones may still ask."""

    __slots__ = ("found", "num_asking", "num_begun", "timer")
    timer: asyncio.TimerHandle
    """Of when to ask again; there is one from the first question on."""

    def __init__(self, found: "asyncio.Future[str]") -> None:
        self.found = found
        self.num_begun = 0
        self.num_asking = 0


class Names:
    """Look-ups on one loop, between it and `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._searches: dict[str, _Search] = {}
        self._known: dict[str, str] = {}

    def look_up(self, name: str) -> "asyncio.Future[str]":
        """The name's IP address, of which one of IPv4 goes first; shared by all who ask meanwhile, so do not cancel it.

        It is the one that the name had before if no name server answers within 0.25 s. Raises OSError where there is
        none. There is no deadline: whoever needs it has one.
        """
        search = self._searches.get(name)
        if search is None:
            search = self._searches[name] = _Search(self._loop.create_future())
        elif search.found.done():
            search.found = self._loop.create_future()
        else:
            return search.found
        self._ask(name, search)
        return search.found

    def close(self) -> None:
        """Ask no more. Threads that still do end by themselves."""
        for search in self._searches.values():
            search.timer.cancel()
        self._searches.clear()

    def _ask(self, name: str, search: _Search) -> None:
        """Once now, and again soon: an answer may be ten seconds on its way although the name is back long since.

        A container's name goes with it, and a question that falls into the moment until it is made again waits for
        name servers that do not answer (5 s, twice). Streams stood still for 11.6 s for that.
        """
        if search.num_asking < _MAX_ASKING:
            search.num_begun += 1
            search.num_asking += 1
            # Not the loop's pool: a few names that are gone would take all of its threads, and it waits for them when
            # it is closed.
            arguments = (name, search, search.num_begun)
            threading.Thread(target=self._wait, args=arguments, name=f"look up {name}", daemon=True).start()
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(search.num_asking - 1, 8))
        search.timer = self._loop.call_later(pause_s, self._not_answered, name, search)

    def _not_answered(self, name: str, search: _Search) -> None:
        known = self._known.get(name)
        if known is None:
            self._ask(name, search)
        else:
            # Who still asks says later what is to be taken next time. A podman's name server that had lost all names
            # but the newest host's held a recovery up for 22 s to 48 s, with the host's address long in use.
            search.found.set_result(known)

    def _wait(self, name: str, search: _Search, number: int) -> None:
        address, error = "", None
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            address = str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
        except (OSError, UnicodeError) as problem:
            error = OSError(f"{name} cannot be looked up: {problem}")
            error.errno = problem.errno if isinstance(problem, OSError) else None
        # A loop that is closed wants no answer any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer, name, search, number, address, error)

    def _answer(self, name: str, search: _Search, number: int, address: str, error: OSError | None) -> None:
        search.num_asking -= 1
        if error is None:
            self._known.pop(name, None)
            self._known[name] = address
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        if not search.found.done():
            if error is None:
                search.found.set_result(address)
            elif error.errno == socket.EAI_AGAIN and name in self._known:
                # Nobody says that there is none, only that nobody can be asked now.
                search.found.set_result(self._known[name])
            elif number == search.num_begun:
                # That there is none says only who was asked last: an earlier answer may be from before it came back.
                search.found.set_exception(error)
                # Who asked may have given up: that nobody looks is no fault.
                search.found.exception()
        if search.found.done():
            search.timer.cancel()
            if not search.num_asking and self._searches.get(name) is search:
                del self._searches[name]
