"""Exit codes of `meshctl`; stable, documented in docs/operations.md. An actor's process uses them too."""

import enum


class ExitCode(enum.IntEnum):
    """What a shell script may rely on."""

    OK = 0
    FAILED = 1
    """Something unexpected; the message says what."""
    USAGE = 2
    """The command line is wrong (as typer has it)."""
    NOT_RUNNING = 3
    """There is no such mesh, or it does not answer."""
    ALREADY_RUNNING = 4
    """A mesh of this name runs already."""
    BAD_CONFIG = 5
    """The topology file, an environment variable or an option has a value that cannot be used."""
    BAD_MODEL = 6
    """The model is missing, damaged, or of a kind that is not supported."""
    CANNOT_BIND = 7
    """An address is taken, or may not be listened on."""
    NO_MEMORY = 8
    """The KV pools do not fit."""
    NOT_READY = 9
    """An actor did not become ready."""
    TIMED_OUT = 10
    """It took longer than allowed."""
    LIMIT_TOO_LOW = 11
    """A limit of the system is too low; the message names it, its value and what is needed."""
    INTERRUPTED = 130
    """Ctrl-C before it was done."""


FATAL_EXITS = frozenset(
    {
        ExitCode.BAD_CONFIG, ExitCode.BAD_MODEL, ExitCode.CANNOT_BIND, ExitCode.NO_MEMORY, ExitCode.LIMIT_TOO_LOW,
    }
)  # fmt: skip
"""With these an actor says that starting it again as it is cannot help."""
