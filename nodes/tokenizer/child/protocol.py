"""What a process says to its rendering child (`render_child.py`), and how that child is started.

A frame is 4 little-endian bytes of length, then MessagePack. The child gets one `Setup`, answers it, and then gets
`ChatRequest`s, or else `AsksToCheck`, each answered by a `Rendered`. Imports no jinja, since `meshctl up` checks
templates without rendering.
"""

import os
import sys
from typing import Final

import msgspec

from mesh.wire.message import Part
from nodes.models.spec import ModelSpec, VocabularyFacts
from nodes.request import Asked
from nodes.tokenizer.templates.dialect import TemplateDialect

HEAD_BYTES: Final = 4
"""The length of a frame as 32 bits: texts of up to 4 GB, far more than the child may allocate (1 GiB)."""
CHILD_DIRECTORY: Final = "/"
"""Where the child runs: the directory of its parent may be gone, and Python does not start in such a one."""


class Setup(Part, frozen=True):
    """What the child is for: with `vocabulary`, to load that model's tokenizer; with a template, to render it; with
    `checks_asks`, to check what requests ask of their draws, and nothing else.

    `memory_bytes` bounds the address space of the child, but while it loads the tokenizer that is `vocabulary_bytes`,
    and thereafter `memory_bytes` on top of what is mapped then. `seconds`: how long it may load the tokenizer and probe
    the template before it ends by SIGALRM; 0: its parent sees to that.
    """

    template: str | None
    special_tokens: dict[str, str]
    max_chars: int
    memory_bytes: int
    parent_pid: int
    vocabulary: ModelSpec | None = None
    vocabulary_bytes: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    checks_asks: bool = False


class AsksToCheck(Part, frozen=True):
    """What a request asks of its draws; the answer's text says in lines what of it will be ignored."""

    asks: list[Asked]


class Rendered(Part, frozen=True):
    """The text, or in answer to a `Setup` the dialect, or the error (`code` is one of `nodes.tokenizer.errors`).

    A `Setup` with `vocabulary` has another answer before that: its facts, or the code of a ModelError. Without a
    template the dialect is empty.
    """

    text: str = ""
    code: str = ""
    message: str = ""
    param: str | None = None
    dialect: TemplateDialect | None = None
    vocabulary: VocabularyFacts | None = None


def frame(message: Part) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def child_command() -> list[str]:
    """The child's command line. `-P`: no module is taken from the directory that it happens to be started in."""
    return [sys.executable, "-P", "-m", "nodes.tokenizer.child.process"]


def child_environment() -> dict[str, str]:
    """Its environment: the child finds the same modules wherever this process found them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}
