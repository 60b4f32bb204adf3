"""A free port for a server that a test or a benchmark starts."""

import random
import socket
from typing import Final

_RANGE: Final = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections and to listeners that name none (32,768 and up)."""
_MOST_TRIES: Final = 1000
"""With nine ports of ten taken, all of so many tries fail once in 10**45 runs."""


def free_port() -> int:
    """A TCP port on which nothing listens, and which the system gives only to a process that asks for just this one.

    Seconds may pass before the server listens, while other processes on the host open connections. Raises OSError if no
    free port was found.
    """
    draw = random.SystemRandom()
    for _ in range(_MOST_TRIES):
        port = draw.choice(_RANGE)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {_MOST_TRIES} tries between {_RANGE.start} and {_RANGE.stop}")
