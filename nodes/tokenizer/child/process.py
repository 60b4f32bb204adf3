"""The process that runs the model's chat template, so that a template can harm nothing but this process. Another one
compiles the schemas and expressions of clients, for the same reason.

A loop inside jinja cannot be interrupted from Python, and memory it takes cannot be taken back: both are bounded by a
process that is killed at its deadline and has a limit on its address space. It talks in frames (`child_protocol.py`)
on its standard input and output, and ends when its input ends or its parent dies. Started by
`nodes/tokenizer/child/bounded_child.py`, and by `checking.py`, for which it loads the model's tokenizer as well.
"""

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from mesh.errors import TypedError
from mesh.wire.message import Part
from nodes.models.errors import ModelDamaged, ModelError
from nodes.models.spec import ModelSpec
from nodes.tokenizer.child.protocol import HEAD_BYTES, AsksToCheck, Rendered, Setup, frame
from nodes.tokenizer.errors import InvalidValue, PrepareError
from nodes.tokenizer.templates.chat_template import ChatRequest, ChatTemplate
from nodes.tokenizer.templates.dialect import TemplateDialect

_PR_SET_PDEATHSIG: Final = 1
"""linux/prctl.h."""
_SHOWN_CHARS: Final = 500
"""Longer ones quote the file that was read."""
_Part = TypeVar("_Part", bound=Part)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    setup = _read(source, Setup)
    if setup is None:
        return
    _watch_parent(setup.parent_pid)
    if setup.checks_asks:
        _limit_memory(setup.memory_bytes)
        _serve_checks(source, sink)
        return
    if setup.vocabulary is None:
        _limit_memory(setup.memory_bytes)
    else:
        _limit_memory(setup.vocabulary_bytes)
        # Its default action ends the process wherever it is, in a loop of a library too.
        signal.setitimer(signal.ITIMER_REAL, setup.seconds[0])
        _write(sink, _describe(setup.vocabulary))
        _limit_memory(min(_mapped_bytes() + setup.memory_bytes, setup.vocabulary_bytes))
        signal.setitimer(signal.ITIMER_REAL, setup.seconds[1])
    if setup.template is None:
        _write(sink, Rendered(dialect=TemplateDialect(forms={})))
        return
    template = _compile(setup.template, setup)
    _write(sink, template if isinstance(template, Rendered) else Rendered(dialect=template.dialect))
    while (request := _read(source, ChatRequest)) is not None:
        _write(sink, template if isinstance(template, Rendered) else _render(template, request))


def _serve_checks(source: BinaryIO, sink: BinaryIO) -> None:
    # Imported here: the asks come with the library that compiles grammars, for which a rendering child has no use.
    importlib.import_module("llguidance")

    from nodes.asks import check_asks

    _write(sink, Rendered())
    while (request := _read(source, AsksToCheck)) is not None:
        try:
            answer = Rendered(text="\n".join(check_asks(request.asks)))
        except TypedError as error:
            answer = Rendered(code=error.code, message=error.message, param=error.param)
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception, and the client's fault
            what = f"{type(error).__name__}: {error}"
            answer = Rendered(code=InvalidValue.code, message=f"It cannot be compiled: {what[:_SHOWN_CHARS]}.")
        _write(sink, answer)


def _describe(spec: ModelSpec) -> Rendered:
    # Imported here: a child that only renders does without it, and has more of its memory left.
    from nodes.model_spec.vocabulary import vocabulary_facts

    try:
        return Rendered(vocabulary=vocabulary_facts(spec))
    except ModelError as error:
        return Rendered(code=error.code, message=error.message)
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception, and the file's fault
        what = f"{type(error).__name__}: {error}"
        message = f"{spec.tokenizer_path or spec.name} cannot be loaded: {what[:_SHOWN_CHARS]}. Download it again."
        return Rendered(code=ModelDamaged.code, message=message)


def _compile(template: str, setup: Setup) -> ChatTemplate | Rendered:
    try:
        return ChatTemplate(template, setup.special_tokens, setup.max_chars)
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


def _watch_parent(parent_pid: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(0)  # The parent died before it could be watched.


def _limit_memory(num_bytes: int) -> None:
    # Where the system's own limit is lower, that holds: it cannot be raised.
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    num_bytes = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _mapped_bytes() -> int:
    """The address space in use; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    # Ctrl-C reaches the whole process group, and SIGTERM every process of a batch job: ending is the parent's decision.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
