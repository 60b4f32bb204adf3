"""What `meshctl` tells people when something is wrong: what, why, what to do next.

    CliError
      WrongUsage           the command line is wrong
      NotRunning           no such mesh, or it does not answer
      AlreadyRunning       a mesh of this name runs already
      BadManifest          what a supervisor wrote down about its mesh cannot be trusted
      BadConfig            a value that cannot be used
        BadKeys            keys of hosts or clients are missing, damaged, or not the ones needed
      BadModel             the model cannot be served
      CannotBind           an address cannot be listened on
      NoMemory             the KV pools do not fit
      LimitTooLow          a limit of the system leaves no room
      StartFailed          an actor did not become ready
        HostTaken          another machine is in the mesh under this host's name
      TimedOut             it took longer than allowed
      TryAgain             refused for now; asking again may help
        HostAway           another host of the mesh is not there, or does not answer
      Undone               somebody else asked for the opposite meanwhile

Each has its exit code (`cli/exit_codes.py`).
"""

from typing import ClassVar

from cli.exit_codes import ExitCode
from mesh.runtime.process_limits import limit_met


class CliError(Exception):
    """Ends a command with a message on stderr and `exit_code`: what is wrong, why, and what to do about it."""

    exit_code: ExitCode = ExitCode.FAILED
    code: ClassVar[str] = "failed"

    def __init_subclass__(cls, *, exit_code: ExitCode | None = None, code: str | None = None) -> None:
        super().__init_subclass__()
        # A kind that sets neither inherits its base's: a model that is not here is a bad model.
        cls.exit_code, cls.code = exit_code or cls.exit_code, code or cls.code

    def __init__(self, what: str, *, why: str, do: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do

    def __str__(self) -> str:
        return f"error: {self.what}\n  why: {self.why}\n  do:  {self.do}"


class WrongUsage(CliError, exit_code=ExitCode.USAGE, code="wrong_usage"):
    """The command line is wrong."""


class NotRunning(CliError, exit_code=ExitCode.NOT_RUNNING, code="not_running"):
    """There is no such mesh, or it does not answer."""


class AlreadyRunning(CliError, exit_code=ExitCode.ALREADY_RUNNING, code="already_running"):
    """A mesh of this name runs already."""


class BadManifest(CliError, code="bad_manifest"):
    """The manifest of a mesh is damaged, another mesh's or another user's: it is not acted on."""


class BadConfig(CliError, exit_code=ExitCode.BAD_CONFIG, code="bad_config"):
    """A topology file, environment variable or option has a value that cannot be used."""


class BadKeys(BadConfig, code="bad_keys"):
    """Keys of hosts or clients are missing, damaged, open to others, there already, or another host's or mesh's."""


class BadModel(CliError, exit_code=ExitCode.BAD_MODEL, code="bad_model"):
    """The model is missing, damaged, or of a kind that is not supported."""


class CannotBind(CliError, exit_code=ExitCode.CANNOT_BIND, code="cannot_bind"):
    """An address is taken, or may not be listened on."""


class NoMemory(CliError, exit_code=ExitCode.NO_MEMORY, code="no_memory"):
    """The KV pools do not fit."""


class LimitTooLow(CliError, exit_code=ExitCode.LIMIT_TOO_LOW, code="limit_too_low"):
    """A limit that the system sets to processes (`mesh/runtime/process_limits.py`) is too low."""


def limit_too_low(what: str, error: BaseException) -> LimitTooLow | None:
    """An error as one about a limit, if that is what led to it. One of ours is told as it is, unless something did."""
    cause = error.__cause__ if isinstance(error, CliError) else error
    if isinstance(error, LimitTooLow) or cause is None or (met := limit_met(cause)) is None:
        return None
    return LimitTooLow(what, why=met.message, do="raise it, then start again")


class StartFailed(CliError, exit_code=ExitCode.NOT_READY, code="not_ready"):
    """An actor did not become ready."""


class HostTaken(StartFailed, code="host_taken"):
    """Another machine is in the mesh under this host's name, or this one was, in a later epoch that it has lost."""


class MeshFull(StartFailed, code="mesh_full"):
    """The registry has as many peers as it may have."""


class TimedOut(CliError, exit_code=ExitCode.TIMED_OUT, code="timed_out"):
    """It took longer than allowed."""


class TryAgain(CliError, code="try_again"):
    """The request was refused for now."""


class HostAway(TryAgain, exit_code=ExitCode.NOT_RUNNING, code="host_away"):
    """Another host of the mesh is not there, or does not answer."""


class Undone(CliError, code="undone"):
    """Somebody else asked for the opposite while the command was waiting."""
