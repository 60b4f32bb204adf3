"""What hello and welcome have to say to be taken. Used by `mesh/link/links.py`."""

from collections.abc import Sequence

from mesh.errors import FrameRefused
from mesh.transport.base import Buffer
from mesh.wire.frames import SYSTEM_CODEC, Hello, Welcome
from mesh.wire.header import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION


def check_hello(parts: Sequence[Buffer]) -> Hello:
    """The hello in a message; raises `FrameRefused` if there is none, or no version in common."""
    hello = SYSTEM_CODEC.decode(parts[1])
    if not isinstance(hello, Hello):
        raise FrameRefused("bad_body", "the body of a hello is expected")
    if not hello.min_version <= PROTOCOL_VERSION <= hello.max_version:
        offered = f"{hello.min_version} to {hello.max_version}"
        raise FrameRefused("wrong_version", f"versions {offered} offered, {PROTOCOL_VERSION} is spoken here")
    return hello


def check_welcome(parts: Sequence[Buffer]) -> Welcome:
    """The welcome in a message; raises `FrameRefused` if there is none, or its version was not offered."""
    welcome = SYSTEM_CODEC.decode(parts[1])
    if not isinstance(welcome, Welcome):
        raise FrameRefused("bad_body", "the body of a welcome is expected")
    if not MIN_PROTOCOL_VERSION <= welcome.version <= PROTOCOL_VERSION:
        raise FrameRefused("wrong_version", f"welcomed to version {welcome.version}")
    return welcome
