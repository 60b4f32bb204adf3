"""Runs one actor in this process: what `meshctl run ROLE` and every process that a supervisor starts end up in.

A supervisor's order comes by the actor's line to it (`mesh/runtime/supervisor_line.py`), whether its process is forked
or an interpreter of its own; why an actor cannot go on is said by the same line.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from cli.errors import CliError
from cli.exit_codes import ExitCode
from cli.plan.role_configs import BUILT_IN, check_config
from cli.release import release
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.processes.by_pid import leave_terminal
from cli.supervisor.processes.children import name_process
from kvstore.errors import DeviceError, DeviceUnavailable, PoolDenied, PoolExhaustedMemory, TransferError
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import ShmHost
from mesh.actor import Actor
from mesh.address import Address
from mesh.errors import (
    ActorFailed,
    BadSetting,
    BindError,
    CoreFailed,
    DrainFailed,
    LimitReached,
    NotReadyInTime,
    Superseded,
    TypedError,
    WrongMesh,
)
from mesh.membership.proof import HostSecret
from mesh.options import SystemOptions
from mesh.run import run_actor
from mesh.runtime.process_limits import limit_met
from mesh.runtime.process_usage import process_age_s
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.supervisor_line import ActorEnd
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes import roles
from nodes.api_keys.entries import BadApiKeys
from nodes.model_spec import ModelError
from nodes.registry.config import RegistryConfig
from nodes.worker.errors import DeviceMemoryShort, GroupNotFormed, WorkerError


class _Known(NamedTuple):
    """Errors of an actor's start that a person has to know about: its exit code, and what to do."""

    code: ExitCode
    do: str
    kinds: tuple[type[TypedError], ...]


_KNOWN: Final = (
    _Known(ExitCode.BAD_MODEL, "correct the model, or give another", (ModelError,)),
    _Known(ExitCode.CANNOT_BIND, "give it another address", (BindError,)),
    _Known(
        ExitCode.NO_MEMORY, "make room, or give it a smaller configuration", (PoolExhaustedMemory, DeviceMemoryShort)
    ),
    _Known(ExitCode.NOT_READY, "start what it waits for, then start it again", (NotReadyInTime,)),
    _Known(ExitCode.LIMIT_TOO_LOW, "raise it, then start again", (LimitReached,)),
    # Another rank was not there in time, or the epoch was too low: the next try may succeed.
    _Known(ExitCode.FAILED, "start it again", (GroupNotFormed, Superseded)),
    _Known(
        ExitCode.BAD_CONFIG,
        "correct its configuration or environment",
        (BadSetting, WrongMesh, BadApiKeys, PoolDenied, DeviceUnavailable, WorkerError, TransferError),
    ),
    # The agent that made the pages has just died, or the device failed in this process: another try may do.
    _Known(ExitCode.FAILED, "start it again", (DeviceError,)),
)
"""In this order: some kinds are among others."""


class RoleRun(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation to run. `secret` is its supervisor's, never in argv, environment or files; `proof` is what that
    gives to an actor that is started by hand beside it. `start_timeout_s`: as of `run_actor`; a supervisor has times
    of its own.
    """

    mesh: str
    role: str
    actor_id: str
    epoch: int
    config: dict[str, Any]
    drain_timeout_s: float = 30.0
    start_timeout_s: float | None = None
    secret: HostSecret | None = None
    proof: bytes = b""


class LastWords(msgspec.Struct, frozen=True):
    """Why an actor could not start, or could not go on, as it tells its supervisor.

    `known_epoch` is that of the later incarnation that the mesh knows, if it was refused for that; else 0. `core` is
    the core that failed, if one did.
    """

    message: str
    known_epoch: int = 0
    core: str = ""


def run_ordered(descriptor: int) -> int:
    """Be the actor that the supervisor at the other end of this line says. Returns its exit code."""
    line = ActorEnd(descriptor)
    order = line.order()
    # Otherwise the supervisor has ended meanwhile, and this is nobody.
    return run_role(msgspec.msgpack.decode(order, type=RoleRun), line) if order else ExitCode.OK


def run_role(run: RoleRun, line: ActorEnd | None = None) -> int:
    """Run the actor until it is told to stop. Returns its exit code, as in `cli/exit_codes.py`.

    `line` goes to its supervisor; None without one.
    """
    directory = MeshDirectory(run.mesh)
    address = Address(run.actor_id, run.epoch)
    name_process(run.actor_id)
    try:
        config = check_config(run.role, run.config)
        actor = make_actor(run.role, config, directory.run)
        manifest = directory.read_manifest() if line is not None else None
        was_forced = run_actor(
            actor,
            address,
            run_directory=directory.run,
            supervisor=manifest.supervisor if manifest is not None else None,
            supervisor_fd=line.descriptor if line is not None else None,
            listen=ZeroMQOptions.of_host(directory.run, config.port) if isinstance(config, RegistryConfig) else None,
            options=SystemOptions(secret=run.secret, proof=run.proof),
            drain_timeout_s=run.drain_timeout_s,
            start_timeout_s=run.start_timeout_s,
        )
        return ExitCode.TIMED_OUT if was_forced else ExitCode.OK
    except CliError as error:
        return _failed(line, error, LastWords(f"{error.what}: {error.why}; {error.do}"))
    except (CoreFailed, DrainFailed, ActorFailed) as error:
        told = CliError(f"the {run.role} {address} has ended", why=error.message, do="report it, with the log")
        core = error.core if isinstance(error, CoreFailed) else ""
        return _failed(line, told, LastWords(error.message, core=core))
    except Exception as error:
        # First: a port that cannot be listened on, or a pool that does not fit, may be so for want of descriptors.
        failure = limit_met(error) or error
        # Which error a role's start can raise is known to the role: those with a remedy are told, others raised.
        if not isinstance(failure, TypedError) or (known := known_failure(failure)) is None:
            raise
        known_epoch = error.known_epoch if isinstance(error, Superseded) else 0
        if line is None and known_epoch:
            # Nobody hears the last words of an actor without a supervisor; the next `meshctl run` reads this.
            with contextlib.suppress(OSError):
                directory.issue(run.actor_id, known_epoch)
        told = CliError(f"the {run.role} {address} cannot start", why=failure.message, do=known.do)
        told.exit_code = known.code
        return _failed(line, told, LastWords(str(failure), known_epoch))


def _failed(line: ActorEnd | None, told: CliError, words: LastWords) -> ExitCode:
    if line is not None:
        line.say_last(msgspec.msgpack.encode(words))
    sys.stderr.write(f"{told}\n")
    return told.exit_code


def known_failure(error: TypedError) -> _Known | None:
    """What to do about an error of a start; None if it is none that a role is known to raise."""
    return next((known for known in _KNOWN if isinstance(error, known.kinds)), None)


def make_actor(role: str, config: Any, run: RunDirectory) -> Actor:
    """The actor of a role; `config` is of the role's own type, as `check_config` returns it."""
    built_in = BUILT_IN[role]
    # Only this module is imported: a process pays for its own role alone.
    make = getattr(importlib.import_module(built_in.module), built_in.actor)
    match role:
        case roles.REGISTRY:
            return make(run, lease_s=config.lease_s, release=release(), config=config)
        case roles.SCHEDULER:
            return make(config, ShmHost())
        case roles.WORKER:
            from nodes.worker.environment import prepare_environment

            prepare_environment()
            return make(config, ShmHost() if config.device == CPU else CudaHost(ShmHost()), age=process_age_s)
        case _:
            return make(config)


def main_of_fork(descriptor: int, log: str) -> int:
    leave_terminal(Path(log))
    return run_ordered(descriptor)


if __name__ == "__main__":
    # Started with the actor's id too, which `ps` then shows.
    sys.exit(run_ordered(int(sys.argv[1])))
