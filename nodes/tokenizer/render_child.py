"""The process that runs the model's chat template, so that a template can harm nothing but this process.

A loop inside jinja cannot be interrupted from Python, and memory it takes cannot be taken back: both are bounded by a
process that is killed at its deadline and has a limit on its address space. It talks in frames (4 little-endian bytes
of length, then MessagePack) on its standard input and output: one `Setup`, then `ChatRequest`s, each answered by a
`Rendered`. It ends when its input ends or its parent dies. Started by `nodes/tokenizer/rendering.py` only.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import BinaryIO, Final, TypeVar

import msgspec

from mesh.wire.message import Part
from nodes.tokenizer.chat_template import ChatRequest, ChatTemplate
from nodes.tokenizer.errors import PrepareError

HEAD_BYTES: Final = 4
_PR_SET_PDEATHSIG: Final = 1
_Part = TypeVar("_Part", bound=Part)


class Setup(Part, frozen=True):
    """What the child is for. `memory_bytes` bounds its address space."""

    template: str
    special_tokens: dict[str, str]
    max_chars: int
    memory_bytes: int
    parent_pid: int


class Rendered(Part, frozen=True):
    """The text, or the error (`code` is one of `nodes.tokenizer.errors`)."""

    text: str = ""
    code: str = ""
    message: str = ""
    param: str | None = None


def frame(message: Part) -> bytes:
    """A message, preceded by its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    setup = _read(source, Setup)
    if setup is None:
        return
    _limit(setup)
    template = _compile(setup)
    _write(sink, template if isinstance(template, Rendered) else Rendered())
    while (request := _read(source, ChatRequest)) is not None:
        _write(sink, template if isinstance(template, Rendered) else _render(template, request))


def _compile(setup: Setup) -> ChatTemplate | Rendered:
    try:
        return ChatTemplate(setup.template, setup.special_tokens, setup.max_chars)
    except PrepareError as error:
        return Rendered(code=error.code, message=error.message, param=error.param)


def _render(template: ChatTemplate, request: ChatRequest) -> Rendered:
    try:
        return Rendered(text=template.render(request))
    except PrepareError as error:
        return Rendered(code=error.code, message=error.message, param=error.param)


def _read(source: BinaryIO, kind: type[_Part]) -> _Part | None:
    head = source.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return msgspec.msgpack.decode(source.read(int.from_bytes(head, "little")), type=kind)


def _write(sink: BinaryIO, message: Part) -> None:
    sink.write(frame(message))
    sink.flush()


def _limit(setup: Setup) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup.parent_pid:
        sys.exit(0)  # The parent died before it could be watched.


def main() -> None:
    """Entry point of the process."""
    # Ctrl-C reaches the whole process group; ending is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
