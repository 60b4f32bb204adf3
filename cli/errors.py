"""What `meshctl` tells people when something is wrong: what, why, what to do next.

    CliError
      WrongUsage           the command line is wrong
      NotRunning           no such mesh, or it does not answer
      AlreadyRunning       a mesh of this name runs already
      BadManifest          what a supervisor wrote down about its mesh cannot be believed
      BadConfig            a value that cannot be used
      BadModel             the model cannot be served
      CannotBind           an address cannot be listened on
      NoMemory             the KV pools do not fit
      StartFailed          an actor did not become ready
      TimedOut             it took longer than allowed
      TryAgain             refused for now; asking again may help
      Undone               somebody else asked for the opposite meanwhile

Each has its exit code (`cli/exit_codes.py`).
"""

from typing import ClassVar

from cli.exit_codes import ExitCode


class CliError(Exception):
    """Ends a command with a message on stderr and `exit_code`: what is wrong, why, and what to do about it."""

    exit_code: ExitCode = ExitCode.FAILED
    code: ClassVar[str] = "failed"

    def __init__(self, what: str, *, why: str, do: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do

    def __str__(self) -> str:
        return f"error: {self.what}\n  why: {self.why}\n  do:  {self.do}"


class WrongUsage(CliError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE
    code = "wrong_usage"


class NotRunning(CliError):
    """There is no such mesh, or it does not answer."""

    exit_code = ExitCode.NOT_RUNNING
    code = "not_running"


class AlreadyRunning(CliError):
    """A mesh of this name runs already."""

    exit_code = ExitCode.ALREADY_RUNNING
    code = "already_running"


class BadManifest(CliError):
    """The manifest of a mesh is damaged, another mesh's or another user's: nothing is done by it."""

    code = "bad_manifest"


class BadConfig(CliError):
    """A topology file, environment variable or option has a value that cannot be used."""

    exit_code = ExitCode.BAD_CONFIG
    code = "bad_config"


class BadModel(CliError):
    """The model is missing, damaged, or of a kind that is not computed here."""

    exit_code = ExitCode.BAD_MODEL
    code = "bad_model"


class CannotBind(CliError):
    """An address is taken, or may not be listened on."""

    exit_code = ExitCode.CANNOT_BIND
    code = "cannot_bind"


class NoMemory(CliError):
    """The KV pools do not fit."""

    exit_code = ExitCode.NO_MEMORY
    code = "no_memory"


class StartFailed(CliError):
    """An actor did not become ready."""

    exit_code = ExitCode.NOT_READY
    code = "not_ready"


class TimedOut(CliError):
    """It took longer than allowed."""

    exit_code = ExitCode.TIMED_OUT
    code = "timed_out"


class TryAgain(CliError):
    """Somebody could not do it just now."""

    code = "try_again"


class Undone(CliError):
    """Somebody else asked for the opposite while this was waited for."""

    code = "undone"
