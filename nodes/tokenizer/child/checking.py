"""Checks a model's tokenizer and chat template before a mesh is started, in a process that can be killed.

Both are data from a disk, or from a hub: a template may loop or take memory without end, and the library that reads
`tokenizer.json` may panic, even abort. `check_texts` has a child such as renders for a tokenizer (`render_child.py`)
load the one and probe the other, with a limit on its memory and a deadline for each, and returns what was found.
Synchronous; called by `cli/plan/model.py` in a supervisor, so it imports neither jinja nor tokenizers.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from nodes.models.errors import ModelDamaged, ModelError, ModelNotFound, ModelUnsupported
from nodes.models.spec import ModelSpec, VocabularyFacts
from nodes.tokenizer.child.protocol import (
    CHILD_DIRECTORY,
    HEAD_BYTES,
    Rendered,
    Setup,
    child_command,
    child_environment,
    frame,
)
from nodes.tokenizer.config import RenderingLimits
from nodes.tokenizer.errors import Overloaded, TemplateError
from nodes.tokenizer.templates.dialect import ContentForm, TemplateDialect

MAX_TEMPLATE_CHARS: Final = 1 << 20
"""The longest templates of known models have 20,000."""
_TEMPLATE_S: Final = 3.0
"""Real templates take 3 to 60 ms. With the start of a process it is below the 5 s in which people are told."""
_SHOWN_CHARS: Final = 300
"""A line of a traceback; what is longer is data that somebody has put into an error."""
_VOCABULARY_S: Final = 20.0
"""Gemma 3's, of 262,144 tokens and 33 MB, takes 2 s on one slow core."""
_VOCABULARY_BYTES: Final = 4 << 30
"""A hundred times the largest published file (34 MB), with threads' stacks: a file made to take all memory fails."""
_MARGIN_S: Final = 2.0
"""For starting the child, which ends itself when the time for its work is over."""
_MODEL_ERRORS: Final = {error.code: error for error in (ModelDamaged, ModelNotFound, ModelUnsupported)}


class TextFacts(NamedTuple):
    """What was found: the vocabulary, by role the form of content that the template takes, sentences for people, and
    variables that the template reads (`TemplateDialect.reads`).
    """

    vocabulary: VocabularyFacts
    forms: dict[str, ContentForm]
    notes: tuple[str, ...]
    reads: tuple[str, ...] = ()


def check_texts(spec: ModelSpec, template: str | None) -> TextFacts:
    """Load the tokenizer of a model, and probe a chat template if there is one; cached, since `meshctl up` plans twice.
    Raises ModelError for the tokenizer, TemplateError for the template, Overloaded if no process can be started.
    """
    if template is not None and len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"it has {len(template)} characters, and at most {MAX_TEMPLATE_CHARS} are read", "messages")
    setup = Setup(
        template=template,
        special_tokens=spec.special_tokens,
        max_chars=0,
        memory_bytes=RenderingLimits().memory_bytes,
        # Not this process yet: `up -d` forks between its two plans, and finds in the copy what it has asked already.
        parent_pid=0,
        vocabulary=msgspec.structs.replace(spec, chat_template=None, weight_files=()),
        vocabulary_bytes=_VOCABULARY_BYTES,
        seconds=(_VOCABULARY_S, _TEMPLATE_S),
    )
    try:
        question = msgspec.msgpack.encode(setup)
    except UnicodeEncodeError as error:
        raise TemplateError(f"it, or a special token, is not valid Unicode: {error}", "messages") from error
    vocabulary, dialect = _ask_child(question, spec.tokenizer_path or spec.name, _stamp(spec.tokenizer_path))
    return TextFacts(vocabulary, dialect.forms, _notes(dialect), dialect.reads)


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
    setup = msgspec.structs.replace(msgspec.msgpack.decode(question, type=Setup), parent_pid=os.getpid())
    child: subprocess.CompletedProcess[bytes] | None = None
    try:
        child = subprocess.run(
            child_command(),
            input=frame(setup),
            capture_output=True,
            env=child_environment(),
            cwd=CHILD_DIRECTORY,
            timeout=_VOCABULARY_S + _TEMPLATE_S + _MARGIN_S,
        )
        output, is_late = child.stdout, child.returncode == -signal.SIGALRM
    except subprocess.TimeoutExpired as expired:
        output, is_late = expired.stdout or b"", True
    except OSError as error:
        raise Overloaded(f"no process can be started to check tokenizer and chat template: {error}") from error
    answers = [*_answers(output)]
    if not answers and child is not None and child.returncode == 1 and b"MemoryError" not in child.stderr:
        # An exception of Python's before the first answer: it is not the model that is at fault.
        lines = child.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it says nothing")
        raise Overloaded(f"the process that checks tokenizer and chat template cannot start: {last[:_SHOWN_CHARS]}")
    if not answers:
        how = f"takes longer than {_VOCABULARY_S:g} s to load" if is_late else "crashes the process that loads it, or"
        how += "" if is_late else f" takes more than {_VOCABULARY_BYTES >> 30} GiB of memory"
        raise ModelDamaged(f"{tokenizer} {how}. Download it again.")
    vocabulary = answers[0].vocabulary
    if vocabulary is None:
        raise _MODEL_ERRORS.get(answers[0].code, ModelError)(answers[0].message)
    if len(answers) < 2:
        late = f"it takes longer than {_TEMPLATE_S:g} s to render a few short chats"
        why = late if is_late else "it crashed the process that rendered a few short chats, or took all memory"
        raise TemplateError(why, "messages")
    dialect = answers[1].dialect
    if dialect is None:
        raise TemplateError(answers[1].message, answers[1].param)
    return vocabulary, dialect


def _answers(output: bytes) -> Iterator[Rendered]:
    """The child's complete answers: one for the tokenizer, one for the template."""
    with contextlib.suppress(msgspec.MsgspecError):
        while len(output) > HEAD_BYTES:
            end = HEAD_BYTES + int.from_bytes(output[:HEAD_BYTES], "little")
            yield msgspec.msgpack.decode(output[HEAD_BYTES:end], type=Rendered)
            output = output[end:]
