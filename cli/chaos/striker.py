"""Deals blows to the actors of this host: signals by pidfd, garbage and slow readers by sockets.

Who an actor is, is what its supervisor has written into the manifest: pid and start time, checked once a pidfd holds
on to the process (`cli/supervisor/processes/by_pid.py`). A process whose start time is another one gets no signal.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from cli.bench.client import Server
from cli.chaos.asked import body, streamed
from cli.chaos.blows import HTTP, Blow, garbage
from cli.supervisor.kept.mesh_directory import ProcessRecord
from cli.supervisor.processes.by_pid import open_process, wait_dead
from mesh.address import Endpoint

_HOLD_S: Final = 0.5
"""How long a connection with garbage is left open: longer than a write takes, so that a reader waits for the rest."""
_NUM_SLOW: Final = 4
"""Slow readers of one blow, and as many that hardly write: with more, a storm would measure its own load."""
_SLOW_SAMPLES: Final = 4
"""Of 256 tokens, about 600 KB with logprobs: more than what kernels take for a socket that nobody reads."""
_BYTE_S: Final = 0.05
"""Between two bytes of a request that comes byte by byte: 20 a second, of several hundred."""
_IPC: Final = "ipc://"

_Where = str | tuple[str, int]
"""A path, or a host and a port."""


class Struck:
    """A process that got a signal. Holds on to it, so that its end is known, until `close`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def is_dead(self) -> bool:
        return wait_dead(self._descriptor, 0.0)

    def send(self, number: signal.Signals) -> None:
        """Nothing, if it is dead: no other process is meant, whoever has its pid now."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)


class Striker:
    """`records` are the processes of this host's manifest, read anew for each blow: they die and are started again."""

    def __init__(self, records: Callable[[], Iterable[ProcessRecord]], server: Server, model: str) -> None:
        self._records = records
        self._server = server
        self._model = model
        self._stopped: set[Struck] = set()

    def signal(self, actor_id: str, number: signal.Signals) -> Struck | None:
        """None if no process runs under this id now, or it cannot be shown that it is the one that was recorded."""
        for record in self._records():
            if record.actor_id == actor_id and record.pid != os.getpid():
                descriptor = open_process(record.pid, record.start_time)
                if descriptor is not None:
                    struck = Struck(descriptor)
                    if number == signal.SIGSTOP:
                        # First: whatever happens next, it is woken again.
                        self._stopped.add(struck)
                    struck.send(number)
                    return struck
        return None

    def wake(self, struck: Struck) -> None:
        """Have one that was stopped go on, if it lives."""
        if struck in self._stopped:
            struck.send(signal.SIGCONT)
            self._stopped.discard(struck)

    def wake_all(self) -> None:
        """Nobody stays stopped, however a storm ends."""
        for struck in list(self._stopped):
            self.wake(struck)

    async def throw(self, blow: Blow, endpoint: Endpoint | None) -> bool:
        """Garbage to HTTP, or to a socket of an actor; whether somebody listened there."""
        if blow.target == HTTP:
            family, address = await self._http()
        elif endpoint is not None and endpoint.control.startswith(_IPC):
            # The seed says which of the two, too.
            chosen = (endpoint.control, endpoint.data)[blow.seed % 2]
            family, address = socket.AF_UNIX, chosen.removeprefix(_IPC)
        else:
            return False
        return await _thrown(family, address, garbage(blow.seed, http=blow.target == HTTP))

    async def read_slowly(self, blow: Blow) -> bool:
        """Clients that do not read, and some that hardly write, for as long as the blow lasts; then they are gone."""
        more: dict[str, object] = {"n": _SLOW_SAMPLES, "temperature": 1.0, "logprobs": 5, "max_tokens": 256}
        asked_for = streamed(body(blow.seed, "slow", 256, self._model) | more)
        whole = self._server.request("POST", "/v1/completions", msgspec.json.encode(asked_for))
        family, address = await self._http()
        halves = [_unread(family, address, whole, blow.lasts_s) for _ in range(_NUM_SLOW)]
        halves += [_hardly_written(family, address, whole, blow.lasts_s) for _ in range(_NUM_SLOW)]
        return any(await asyncio.gather(*halves))

    async def _http(self) -> tuple[int, _Where]:
        where = self._server.address or self._server.host
        found = await asyncio.get_running_loop().getaddrinfo(where, self._server.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return family, (str(address[0]), int(address[1]))


async def _thrown(family: int, address: _Where, data: bytes) -> bool:
    async def throw(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, data)
        while await loop.sock_recv(connection, 1 << 16):
            pass

    return await _connected(family, address, throw, _HOLD_S)


async def _unread(family: int, address: _Where, request: bytes, lasts_s: float) -> bool:
    async def be_slow(connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, request)
        await asyncio.sleep(lasts_s)

    return await _connected(family, address, be_slow, lasts_s)


async def _hardly_written(family: int, address: _Where, request: bytes, lasts_s: float) -> bool:
    async def be_slow(connection: socket.socket) -> None:
        for at in range(len(request)):
            await asyncio.get_running_loop().sock_sendall(connection, request[at : at + 1])
            await asyncio.sleep(_BYTE_S)

    return await _connected(family, address, be_slow, lasts_s)


async def _connected(
    family: int, address: _Where, use: Callable[[socket.socket], Awaitable[None]], lasts_s: float
) -> bool:
    """Whether somebody listened; `use` may take `lasts_s`. Its end is abrupt: what was unread is reset."""
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        # A reader's window, or the kernel would take half a MB for it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(connection, address)
        except OSError:
            return False
        # Whoever is offended closes the connection, which is as good an answer as any.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(lasts_s):
                await use(connection)
    return True
