"""A port for a server that a test or a benchmark starts."""

import random
import socket
from typing import Final

_RANGE: Final = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections and to listeners that name none (32,768 and up)."""
_MOST_TRIES: Final = 1000


def free_port() -> int:
    """A TCP port on which nothing listens, and which nobody is given who does not ask for just this one.

    Between here and the server's listening there may be seconds; whatever else runs on the host connects meanwhile.
    Raises OSError where none was found free.
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
