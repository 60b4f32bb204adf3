"""The private line between a supervisor and one of its actors: one pair of sockets for each process.

    supervisor --Finish: drain, within so many seconds--> actor
               <--Signalled: somebody has told me to end--
               --its end: the supervisor is gone--------->

By signals alone an actor could not tell its supervisor's word from anybody's: a batch system or a container engine
sends SIGTERM to every process of a job at once, and two pending signals of one number are one. So here a supervisor
says what it wants, and a signal to one of its actors is a request to the host, which is passed up.
"""

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Final

_FINISH: Final = struct.Struct("<d")
_SIGNALLED: Final = struct.Struct("<B")
_FRAME_BYTES: Final = 64
"""More than any frame has, so that a frame of a later release is read whole, and left."""


class ActorEnd:
    """An actor's end, by its descriptor. Any pipe that ends with the supervisor will do, if nothing is ever said."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_blocking(descriptor, False)

    def read(self) -> list[float] | None:
        """The limits, in seconds, of the drains that are asked for and were not read yet; None: the supervisor is gone.

        Raises OSError if the line is broken, which comes to the same.
        """
        found: list[float] = []
        while True:
            try:
                frame = os.read(self.descriptor, _FRAME_BYTES)
            except BlockingIOError:
                return found
            if not frame:
                return None
            if len(frame) == _FINISH.size:
                found += _FINISH.unpack(frame)

    def pass_up(self, number: signal.Signals) -> bool:
        """Tell the supervisor of a signal; False if it cannot be told, and the actor has to see to it by itself."""
        try:
            os.write(self.descriptor, _SIGNALLED.pack(number))
        except BlockingIOError:
            # It has been told often enough already.
            return True
        except OSError:
            return False
        return True


class SupervisorEnd:
    """The supervisor's end, with `theirs` for the process that is to be started, closed here once it has it."""

    def __init__(self) -> None:
        # Frames stay whole.
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def finish(self, within_s: float) -> None:
        """Have the actor drain and end."""
        # It has just died, which its supervisor hears of in another way.
        with contextlib.suppress(OSError):
            self._socket.send(_FINISH.pack(within_s))

    def read(self, on_signal: Callable[[signal.Signals], None]) -> bool:
        """Read what the actor has passed up; False once it is gone."""
        while True:
            try:
                frame = self._socket.recv(_FRAME_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not frame:
                return False
            if len(frame) == _SIGNALLED.size:
                with contextlib.suppress(ValueError):
                    on_signal(signal.Signals(*_SIGNALLED.unpack(frame)))

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()
