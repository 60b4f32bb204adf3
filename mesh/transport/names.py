"""Looks up host names in tcp addresses before ZeroMQ sees them.

ZeroMQ resolves a name in the one thread that serves all sockets, and the whole process stands still meanwhile: a name
server may take 5 s or more to report that a container is gone, and every actor that dialed one was killed for its
silence. Here each look-up has a thread of its own; further requests for a name being looked up wait for that answer.

A running mesh survives the failure of its name server: if that is silent or broken, the name's previous addresses are
used. A host seldom comes back under others; if it does, no welcome comes from the old ones, and the host is dialed
again.

Of several addresses of a name one may be of a family or network that its host does not listen in, or that is cut off:
each is dialed in turn until one answers.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from typing import Final

_TCP: Final = "tcp://"

_FIRST_PAUSE_S: Final = 0.25
"""Name servers answer in milliseconds; a stream that waits for one must not stand still for long."""
_MAX_PAUSE_S: Final = 2.0
"""So eight look-ups, all that may run, span 12 s: the first has given up by then (10 s) and makes room for another."""
# Look-ups of one name at a time; every actor on every host may make as many. Resolvers give up after 10 s or 20 s.
_MAX_ASKING: Final = 8
_MAX_KNOWN: Final = 4096
"""As many as a list may have hosts: 400 KB. A host recreated under new names leaves one behind each time."""


def name_in(where: str) -> str:
    """The host name that must be looked up before `where` is dialed; "" if there is none."""
    if not where.startswith(_TCP):
        return ""
    host = where.removeprefix(_TCP).rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return ""


def with_address(where: str, address: str) -> str:
    return f"{_TCP}{f'[{address}]' if ':' in address else address}:{where.rpartition(':')[2]}"


class _Search:
    """The look-ups of one name. `found` is what callers now wait for; threads of earlier look-ups may still run."""

    __slots__ = ("found", "num_asking", "num_begun", "timer")
    timer: asyncio.TimerHandle
    """When to ask again; set from the first look-up on."""

    def __init__(self, found: "asyncio.Future[str]") -> None:
        self.found = found
        self.num_begun = 0
        self.num_asking = 0


class Names:
    """The look-ups of one event loop, until `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._searches: dict[str, _Search] = {}
        self._known: dict[str, list[str]] = {}

    def look_up(self, name: str) -> "asyncio.Future[str]":
        """The name's IP address, preferably IPv4, of those that did not fail last. The future is shared with other
        callers: do not cancel it.

        If no name server answers within 0.25 s, it is an address that the name had before. Raises OSError if there is
        none. There is no deadline: the caller has its own.
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

    def failed(self, name: str, address: str) -> None:
        """Nobody answered there: it is the last of the name's addresses from now on."""
        known = self._known.get(name, [])
        if address in known:
            known.remove(address)
            known.append(address)

    def close(self) -> None:
        """Stop asking. Threads that are still asking end by themselves."""
        for search in self._searches.values():
            search.timer.cancel()
        self._searches.clear()

    def _ask(self, name: str, search: _Search) -> None:
        """Ask now, and again soon: one answer may take ten seconds although the name has long been back.

        A container's name vanishes with it, and a look-up made before it exists again waits for name servers that do
        not answer (5 s, twice). Streams once stood still for 11.6 s because of that.
        """
        if search.num_asking < _MAX_ASKING:
            search.num_begun += 1
            search.num_asking += 1
            # Not the loop's thread pool: a few vanished names would occupy all its threads, and closing it would wait
            # for them.
            arguments = (name, search, search.num_begun)
            threading.Thread(target=self._wait, args=arguments, name=f"look up {name}", daemon=True).start()
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(search.num_asking - 1, 8))
        search.timer = self._loop.call_later(pause_s, self._not_answered, name, search)

    def _not_answered(self, name: str, search: _Search) -> None:
        known = self._known.get(name)
        if known is None:
            self._ask(name, search)
        else:
            # Threads still asking will provide the address to use next time. A podman name server that had lost all
            # names but the newest host's once delayed a recovery by 22 s to 48 s, although the address was in use.
            search.found.set_result(known[0])

    def _wait(self, name: str, search: _Search, number: int) -> None:
        addresses: list[str] = []
        error = None
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = [str(entry[4][0]) for entry in sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)]
        except (OSError, UnicodeError) as problem:
            error = OSError(f"{name} cannot be looked up: {problem}")
            error.errno = problem.errno if isinstance(problem, OSError) else None
        # A closed loop no longer needs the answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer, name, search, number, addresses, error)

    def _answer(self, name: str, search: _Search, number: int, addresses: list[str], error: OSError | None) -> None:
        search.num_asking -= 1
        if error is None:
            before = self._known.pop(name, [])
            # New ones first: a host that is back has them. The others in the order in which they failed.
            self._known[name] = sorted(addresses, key=lambda one: before.index(one) if one in before else -1)
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        if not search.found.done():
            # EAI_AGAIN is no answer that the name does not exist, only that no name server can be asked now.
            if error is None or (error.errno == socket.EAI_AGAIN and name in self._known):
                search.found.set_result(self._known[name][0])
            elif number == search.num_begun:
                # Only the latest look-up may say that there is none: an earlier one may predate the name's return.
                search.found.set_exception(error)
                # Retrieved here, as the callers may have given up: asyncio would log an exception never retrieved.
                search.found.exception()
        if search.found.done():
            search.timer.cancel()
            if not search.num_asking and self._searches.get(name) is search:
                del self._searches[name]
