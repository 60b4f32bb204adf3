"""What an engine raises for what it is, or what is done with it. What is wrong with a request is an `ApiError`, the
same one that HTTP answers with (`nodes/gateway/errors.py`).

    EngineError
      StartFailed      its mesh could not be started, or the mesh to attach to is not there
      EngineClosed     it was closed
      WrongProcess     it is used in a process other than the one that made it
      WrongLoop        it is used where waiting for it would never end, or a stream in another loop than its own
      MeshGone         its mesh has ended
"""

from mesh.errors import TypedError


class EngineError(TypedError, code="engine_error"):
    """Base of these errors: the message says what is wrong, why, and what to do."""


class StartFailed(EngineError, code="start_failed"):
    """There is no mesh to use."""


class EngineClosed(EngineError, code="engine_closed"):
    """The engine was closed, perhaps while the request ran."""


class WrongProcess(EngineError, code="wrong_process"):
    """Forked, or sent to another process: its threads and sockets are in the first one."""


class WrongLoop(EngineError, code="wrong_loop"):
    """Used on the engine's own thread, or a stream in another event loop than the one that it began in."""


class MeshGone(EngineError, code="mesh_gone"):
    """The supervisor has ended, or the registry no longer admits the engine's gateway."""
