"""The process that a mesh is for, where that is not `meshctl`: an engine, whose gateway is the mesh's only one.

It started this process, which tells it when its gateway can join. Its end is the end of a pipe, and of the mesh.
"""

import asyncio
import contextlib
import fcntl
import os
import select
from typing import Any

import msgspec

from cli.supervisor.keeper import ProcessKeeper
from mesh.address import Address
from nodes.engine.startup import Begun, News
from nodes.roles import GATEWAY

_READ_BYTES = 4096
"""Nothing comes after the first line; whatever does is dropped."""


class Owner:
    """The owner of one mesh. `lifeline` is the reading end of its pipe, `answer` where news for it go.

    Raises SystemExit if it is gone already.
    """

    def __init__(self, lifeline: int, answer: int, gateway: Address) -> None:
        self._lifeline, self._answer, self._gateway = lifeline, answer, gateway
        # Until there is a loop to see the pipe's end, the kernel ends this process (SIGIO): what it does before that,
        # fetching a model for example, may take an hour, and there is nothing yet that would be left behind.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        self._set(os.O_NONBLOCK | os.O_ASYNC)
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        if any(event & select.POLLHUP for _, event in poll.poll(0)):
            # It ended while this process was starting, and of that there is no signal.
            raise SystemExit(0)

    def begin(self, keeper: ProcessKeeper, config: dict[str, Any]) -> None:
        """Its gateway can join from now on. `config` are the fields of that gateway's configuration."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._lifeline, self._look, loop, keeper)
        self._set(os.O_NONBLOCK)
        proof = keeper.prove(*self._gateway, GATEWAY)
        timeout_s = keeper.settings.supervision.start_timeout_s
        self.tell(Begun(gateway=self._gateway.actor_id, proof=proof, config=config, start_timeout_s=timeout_s))

    def tell(self, news: News) -> None:
        # It may be gone already, which its pipe says as well.
        with contextlib.suppress(OSError):
            os.write(self._answer, msgspec.json.encode(news) + b"\n")

    def _look(self, loop: asyncio.AbstractEventLoop, keeper: ProcessKeeper) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(self._lifeline, _READ_BYTES):
                return
            loop.remove_reader(self._lifeline)
            # At once: there is nobody left to finish anything for.
            keeper.stop("the engine has ended", force=True)
            # Nor for actors that a zygote is to fork once it has imported everything.
            keeper.close()

    def _set(self, flags: int) -> None:
        fcntl.fcntl(self._lifeline, fcntl.F_SETFL, flags)
