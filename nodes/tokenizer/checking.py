"""Checks a model's tokenizer and chat template before a mesh is started, in a process that can be killed.

Both are data from a disk, or from a hub: a template may loop or take memory without end, and the library that reads
`tokenizer.json` may panic, even abort. `check_texts` has a child such as renders for a tokenizer (`render_child.py`)
load the one and probe the other, with a limit on its memory and a deadline for each, and returns what was found.
Synchronous; called by `cli/plan/model.py` in a supervisor, so it imports neither jinja nor tokenizers.
"""

import os
import select
import subprocess
import time
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from nodes.models.errors import ModelDamaged, ModelError, ModelNotFound, ModelUnsupported
from nodes.models.spec import ModelSpec, VocabularyFacts
from nodes.tokenizer.child_protocol import HEAD_BYTES, Rendered, Setup, child_command, child_environment
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.dialect import ContentForm, TemplateDialect
from nodes.tokenizer.errors import Overloaded, TemplateError

MAX_TEMPLATE_CHARS: Final = 1 << 20
"""The longest templates of known models have 20,000."""
_TEMPLATE_S: Final = 4.0
_VOCABULARY_S: Final = 20.0
"""Gemma 3's, of 262,144 tokens and 33 MB, takes 2 s on one slow core."""
_VOCABULARY_BYTES: Final = 4 << 30
_MAX_ANSWER_BYTES: Final = 1 << 20
_MODEL_ERRORS: Final = {error.code: error for error in (ModelDamaged, ModelNotFound, ModelUnsupported)}


class TextFacts(NamedTuple):
    """What was found: the vocabulary, by role the form of content that the template takes, and sentences for people."""

    vocabulary: VocabularyFacts
    forms: dict[str, ContentForm]
    notes: tuple[str, ...]


def check_texts(spec: ModelSpec, template: str | None) -> TextFacts:
    """Load the tokenizer of a model, and probe a chat template, its own or another one, if there is one.

    Found once for the same files and template in a process, since `meshctl up` plans twice. Raises ModelError if the
    tokenizer cannot be loaded, TemplateError if the template cannot be used, Overloaded if no process can be started.
    """
    if template is not None and len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"it has {len(template)} characters, and at most {MAX_TEMPLATE_CHARS} are read", "messages")
    setup = Setup(
        template=template,
        special_tokens=spec.special_tokens,
        max_chars=0,
        memory_bytes=RenderingLimits().memory_bytes,
        parent_pid=os.getpid(),
        vocabulary=msgspec.structs.replace(spec, chat_template=None, weight_files=()),
        vocabulary_bytes=_VOCABULARY_BYTES,
    )
    try:
        question = msgspec.msgpack.encode(setup)
    except UnicodeEncodeError as error:
        raise TemplateError(f"it, or a special token, is not valid Unicode: {error}", "messages") from error
    vocabulary, dialect = _ask_child(question, spec.tokenizer_path or spec.name, _stamp(spec.tokenizer_path))
    return TextFacts(vocabulary, dialect.forms, _notes(dialect))


def _notes(dialect: TemplateDialect) -> tuple[str, ...]:
    left_out = [
        f"the chat template leaves out messages of the role {role}: such chats are refused" for role in dialect.left_out
    ]
    # Quoted, as it is the template's own text and may hold anything.
    refused = [
        f"the chat template refuses messages of the role {role}: {said!r}" for role, said in dialect.refused.items()
    ]
    return (*left_out, *refused)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=8)
def _ask_child(question: bytes, tokenizer: str, _stamp: tuple[int, int]) -> tuple[VocabularyFacts, TemplateDialect]:
    try:
        child = subprocess.Popen(
            child_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic's backtrace, which its error says better
            env=child_environment(),
        )
    except OSError as error:
        raise Overloaded(f"no process can be started to check tokenizer and chat template: {error}") from error
    with child:
        try:
            vocabulary = _vocabulary(child, question, tokenizer)
            has_template = msgspec.msgpack.decode(question, type=Setup).template is not None
            return vocabulary, _dialect(child) if has_template else TemplateDialect(forms={})
        finally:
            child.kill()


def _vocabulary(child: subprocess.Popen[bytes], question: bytes, tokenizer: str) -> VocabularyFacts:
    until = time.monotonic() + _VOCABULARY_S
    try:
        _send(child, len(question).to_bytes(HEAD_BYTES, "little") + question, until)
        answer = _receive(child, until)
    except TimeoutError:
        raise ModelDamaged(f"{tokenizer} takes longer than {_VOCABULARY_S:g} s to load. Download it again.") from None
    except (OSError, EOFError, msgspec.MsgspecError):
        raise ModelDamaged(
            f"{tokenizer} crashed the process that loaded it, or takes more than {_VOCABULARY_BYTES >> 30} GiB of"
            " memory. Download it again."
        ) from None
    if answer.vocabulary is None:
        raise _MODEL_ERRORS.get(answer.code, ModelError)(answer.message)
    return answer.vocabulary


def _dialect(child: subprocess.Popen[bytes]) -> TemplateDialect:
    try:
        answer = _receive(child, time.monotonic() + _TEMPLATE_S)
    except TimeoutError:
        why = f"it takes longer than {_TEMPLATE_S:g} s to render a few short chats"
        raise TemplateError(why, "messages") from None
    except (OSError, EOFError, msgspec.MsgspecError):
        why = "it crashed the process that rendered a few short chats, or took all memory"
        raise TemplateError(why, "messages") from None
    if answer.dialect is None:
        raise TemplateError(answer.message, answer.param)
    return answer.dialect


def _send(child: subprocess.Popen[bytes], data: bytes, until: float) -> None:
    """Write all. Raises TimeoutError if the child does not read, BrokenPipeError if it has ended."""
    assert child.stdin is not None, "the child has no pipe for input"
    fd, rest = child.stdin.fileno(), memoryview(data)
    os.set_blocking(fd, False)
    while rest:
        _wait(fd, select.POLLOUT, until)
        rest = rest[os.write(fd, rest) :]


def _receive(child: subprocess.Popen[bytes], until: float) -> Rendered:
    """One answer. Raises TimeoutError; EOFError if the child has ended; MsgspecError."""
    assert child.stdout is not None, "the child has no pipe for output"
    fd = child.stdout.fileno()
    num_bytes = int.from_bytes(_read(fd, HEAD_BYTES, until), "little")
    if num_bytes > _MAX_ANSWER_BYTES:
        raise EOFError("the answer is longer than any can be")
    return msgspec.msgpack.decode(_read(fd, num_bytes, until), type=Rendered)


def _read(fd: int, num_bytes: int, until: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        _wait(fd, select.POLLIN, until)
        piece = os.read(fd, num_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _wait(fd: int, event: int, until: float) -> None:
    poller = select.poll()
    poller.register(fd, event)
    if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError
