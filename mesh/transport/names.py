"""Names of hosts in tcp addresses, looked up before ZeroMQ sees them.

ZeroMQ looks a name up in the one thread that serves all sockets, and everything of the process stands still meanwhile:
of a container that is gone a name server may say so after 5 s or more, and every actor that dialed one was killed for
its silence. A look-up is a thread of its own, and of one name there is one at a time.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from typing import Final

_TCP: Final = "tcp://"


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


class Names:
    """Look-ups on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: dict[str, asyncio.Future[str]] = {}

    def look_up(self, name: str) -> "asyncio.Future[str]":
        """The name's IP address, of which one of IPv4 goes first; shared by all who ask meanwhile, so do not cancel it.

        Raises OSError where there is none. There is no deadline: whoever needs it has one.
        """
        found = self._running.get(name)
        if found is None:
            found = self._running[name] = self._loop.create_future()
            # Not the loop's pool: a few names that are gone would take all of its threads, and it waits for them when
            # it is closed.
            threading.Thread(target=self._ask, args=(name, found), name=f"look up {name}", daemon=True).start()
        return found

    def _ask(self, name: str, found: "asyncio.Future[str]") -> None:
        address, error = "", None
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            address = str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
        except (OSError, UnicodeError) as problem:
            error = OSError(f"{name} cannot be looked up: {problem}")
        # A loop that is closed wants no answer any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer, name, found, address, error)

    def _answer(self, name: str, found: "asyncio.Future[str]", address: str, error: OSError | None) -> None:
        del self._running[name]
        if found.cancelled():
            return
        if error is None:
            found.set_result(address)
        else:
            found.set_exception(error)
            # Who asked may have given up: that nobody looks is no fault.
            found.exception()
