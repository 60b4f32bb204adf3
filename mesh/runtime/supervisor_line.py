"""The private line between a supervisor and one of its actors: one pair of sockets for each process.

    supervisor --its order: what to be------------------> actor    the first frame, sent before the process starts
               --Finish: drain, within so many seconds-->
               <--Signalled: somebody has told me to end--
               <--its last words: why it cannot go on-----
               --its end: the supervisor is gone--------->

By signals alone an actor could not tell its supervisor's word from anybody's: a batch system or a container engine
sends SIGTERM to every process of a job at once, and two pending signals of one number are one. So here a supervisor
says what it wants, and a signal to one of its actors is a request to the host, which is passed up. What is in an order
and in last words is known to those who start actors (`cli/supervisor/forks/role.py`); this passes bytes on.
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
MAX_FRAME_BYTES: Final = 1 << 16
"""An order with a role's whole configuration has some KB, and a Unix socket takes 200 KB in one message. Frames of a
later release are read whole, and left."""


class ActorEnd:
    """An actor's end, by its descriptor. Any pipe that ends with the supervisor will do, if nothing is ever said."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_blocking(descriptor, False)

    def order(self) -> bytes:
        """The first frame; empty if the supervisor is gone. Raises OSError if it has sent none."""
        return os.read(self.descriptor, MAX_FRAME_BYTES)

    def read(self) -> list[float] | None:
        """The limits, in seconds, of the drains that are asked for and were not read yet; None: the supervisor is gone.

        Raises OSError if the line is broken, which comes to the same.
        """
        found: list[float] = []
        while True:
            try:
                frame = os.read(self.descriptor, MAX_FRAME_BYTES)
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

    def say_last(self, words: bytes) -> None:
        """Tell the supervisor, if it is there, why this actor ends; more than one byte."""
        with contextlib.suppress(OSError):
            os.write(self.descriptor, words)


class SupervisorEnd:
    """The supervisor's end, with `theirs` for the process that is to be started, closed here once it has it."""

    def __init__(self) -> None:
        self.last_words = b""
        # Frames stay whole.
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def give_order(self, order: bytes) -> None:
        """Say what the actor is to be, before it starts. Raises OSError."""
        # A longer frame would be cut at the reader's buffer, without an error there.
        if len(order) > MAX_FRAME_BYTES:
            raise OSError(f"its configuration has {len(order)} bytes; at most {MAX_FRAME_BYTES} fit")
        self._socket.send(order)

    def finish(self, within_s: float) -> None:
        """Have the actor drain and end."""
        # It has just died, which its supervisor hears of in another way.
        with contextlib.suppress(OSError):
            self._socket.send(_FINISH.pack(within_s))

    def read(self, on_signal: Callable[[signal.Signals], None]) -> bool:
        """Read what the actor has passed up; False once it is gone."""
        while True:
            try:
                frame = self._socket.recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not frame:
                return False
            if len(frame) == _SIGNALLED.size:
                with contextlib.suppress(ValueError):
                    on_signal(signal.Signals(*_SIGNALLED.unpack(frame)))
            else:
                self.last_words = frame

    def close(self) -> None:
        self._socket.close()
        self.theirs.close()
