"""The host's secret: which roles need a proof from it, and how an actor that is not forked gets it.

It comes through a pipe that both ends close at once.
"""

import contextlib
import os
from collections.abc import Generator, Iterable

import msgspec

from cli.errors import WrongUsage
from cli.plan.role_configs import CONFIG_TYPES
from cli.plan.settings import Settings
from mesh.membership.proof import HostSecret

_MAX_BYTES = 1 << 16
"""What a pipe holds before a writer waits; a mesh of a thousand actors needs a third of it."""


def draw_secret(settings: Settings, supervised: Iterable[str]) -> HostSecret:
    """A new secret for a host's supervisor. With `external` the mesh's own roles need no proof."""
    return HostSecret.draw(settings.name, settings.on, supervised, () if settings.external else CONFIG_TYPES)


@contextlib.contextmanager
def secret_pipe(secret: HostSecret) -> Generator[int]:
    """The reading end of a pipe with the secret in it, open as long as the context lasts. Raises OSError."""
    reader, writer = os.pipe()
    try:
        try:
            os.set_blocking(writer, False)
            os.write(writer, msgspec.msgpack.encode(secret))
        finally:
            os.close(writer)
        yield reader
    finally:
        os.close(reader)


def read_secret(descriptor: int) -> HostSecret:
    """Read what `secret_pipe` wrote, to the end, and close it. Raises WrongUsage if there is no secret."""
    try:
        with open(descriptor, "rb") as pipe:
            return msgspec.msgpack.decode(pipe.read(_MAX_BYTES), type=HostSecret)
    except (OSError, msgspec.MsgspecError) as error:
        raise WrongUsage(
            f"--secret-fd {descriptor} cannot be used", why=str(error), do="leave it out: only supervisors pass it"
        ) from error
