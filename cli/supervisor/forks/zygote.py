"""The warm process that actors are forked from: everything imported, no operation of torch run, one thread.

    supervisor --ForkRequest, a line--> zygote --fork--> helper --fork--> actor
               <------Forked-------            <process-        (helper exits: the actor becomes the supervisor's child)

    supervisor --SpareRequest, a channel--> zygote --fork--> helper --fork--> spare
               <------Forked-------                <-process-
               <------------------------ZygoteReady---------------------------

A spare is another zygote, which waits until this one is dead: importing again takes seconds in which no actor returns.
A child forked after one parallel matmul hangs, since the pool's threads are not in it; so the zygote runs nothing and
checks before every fork that it has a single thread. Measured: import 0.3 s without torch and 0.9 to 1.6 s with it,
fork to ready 19 to 33 ms.
Frames are MessagePack over a SOCK_SEQPACKET pair; when the pair is closed the zygote ends, and at nothing less: signals
that say so are meant for the host (`mesh/runtime/supervisor_line.py`). Started by
`cli/supervisor/forks/zygote_client.py` with OPENBLAS_NUM_THREADS=1 and what `nodes/worker/environment.py` lists.
"""

import gc
import importlib
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Final, NoReturn

import msgspec

from cli.supervisor.forks.role import main_of_fork
from cli.supervisor.processes.by_pid import STOP_SIGNALS, Process

MAX_FRAME_BYTES: Final = 1 << 16
"""A request has a path in it, of 4 KiB at most; what the actor is to be comes to it by its line."""
_PROCESS: Final = struct.Struct("<qq")


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork an actor; its end of its line comes with this. `number` tells its answer from others."""

    number: int
    log: str


class SpareRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a spare, which serves the channel that comes with this."""

    number: int


class ZygoteReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything is imported; requests are taken."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The actor, or the spare, lives, and the zygote is not its parent. The numbers are as in `processes.Process`."""

    number: int
    pid: int
    start_time: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No actor, or no spare, was forked."""

    number: int
    reason: str


ZygoteRequest = ForkRequest | SpareRequest
ZygoteMessage = ZygoteReady | Forked | ForkFailed


def main(descriptor: int, modules: list[str]) -> int:
    """Import `modules`, then serve until the supervisor closes its end."""
    # In actors too, until they have handlers of their own.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for module in ("mesh.run", *modules):
        importlib.import_module(module)
    gc.collect()
    # What is here now is shared with all children until they write to it; a collection would touch every object.
    gc.freeze()
    channel: socket.socket | None = socket.socket(fileno=descriptor)
    while channel is not None:
        channel.send(msgspec.msgpack.encode(ZygoteReady()))
        # A forked spare returns from there too, with its own channel and nothing of this zygote's on its stack.
        channel = _serve(channel)
    return 0


def _serve(channel: socket.socket) -> socket.socket | None:
    """Fork until the supervisor hangs up, then return None. In a spare that is forked here, return its own channel."""
    with channel:
        while True:
            frame, descriptors, _, _ = socket.recv_fds(channel, MAX_FRAME_BYTES, 1)
            if not frame:
                return None
            request = msgspec.msgpack.decode(frame, type=ZygoteRequest)
            # An actor's line, or a spare's channel.
            (handed,) = descriptors
            answer: Forked | ForkFailed
            try:
                process = _fork_orphan()
            except OSError as error:
                answer = ForkFailed(number=request.number, reason=str(error))
            else:
                if process is None:
                    # In the child: an actor never returns from here, a spare goes on as a zygote.
                    if isinstance(request, ForkRequest):
                        _run_actor(request, channel, handed)
                    return socket.socket(fileno=handed)
                answer = Forked(number=request.number, pid=process.pid, start_time=process.start_time)
            # The child has its own copy. If this one stayed open, nobody would see it end with the child.
            os.close(handed)
            channel.send(msgspec.msgpack.encode(answer))


def _run_actor(request: ForkRequest, channel: socket.socket, line: int) -> NoReturn:
    status = 1
    try:
        channel.close()
        status = main_of_fork(line, request.log)
    except BaseException:  # noqa: BLE001 - whatever it is must not run on as a second zygote
        traceback.print_exc()
    finally:
        _exit(status)


def _fork_orphan() -> Process | None:
    """Fork a process whose parent is dead by the time that this returns; None in that process. Raises OSError."""
    # Counted by the kernel: `threading` knows nothing of threads that C libraries start.
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise OSError(f"the zygote has {num_threads} threads; a fork would hang")
    # Through a pipe, since the actor's pid is known to its helper alone, which is dead when this returns.
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(reader)
        try:
            orphan = os.fork()
        except OSError as error:
            # Its parent says why, so that a limit of the system can be named.
            _exit(error.errno or 1)
        if orphan == 0:
            os.close(writer)
            return None
        # Until this helper reaps it the pid is that orphan's, even if it has died.
        os.write(writer, _PROCESS.pack(*Process.of(orphan)))
        _exit(0)
    os.close(writer)
    try:
        _, status = os.waitpid(helper, 0)
        answer = os.read(reader, _PROCESS.size)
    finally:
        os.close(reader)
    if len(answer) != _PROCESS.size:
        code = os.waitstatus_to_exitcode(status)
        raise OSError(f"the second fork failed: {os.strerror(code) if code > 0 else f'signal {-code}'}")
    return Process(*_PROCESS.unpack(answer))


def _exit(status: int) -> NoReturn:
    """Exit without the interpreter's shutdown, which would run what the zygote registered for its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
