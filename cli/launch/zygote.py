"""The warm process that actors are forked from: all imported, no operation of torch run, one thread.

    supervisor --ForkRequest--> zygote --fork--> helper --fork--> actor
               <--Forked(pid)--        <--pid--         (helper exits: the actor becomes the supervisor's child)

A child forked after one parallel matmul hangs, since the pool's threads are not in it; so the zygote runs nothing and
checks before every fork that it is alone in its process. Measured: import 0.3 s without torch and 0.9 to 1.6 s with
it, fork to ready 19 to 33 ms.
Frames are MessagePack over a SOCK_SEQPACKET pair; the end of the pair is the end of the zygote. Started by
`cli/launch/zygote_client.py` with OPENBLAS_NUM_THREADS=1 and what `nodes/worker/environment.py` lists.
"""

import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import Final

import msgspec

from cli.launch.role import RoleRun, main_of_fork

MAX_FRAME_BYTES: Final = 1 << 16


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork an actor. `number` tells its answer from others."""

    number: int
    run: RoleRun
    log: str


class ZygoteReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything is imported; requests are taken."""

    import_s: float


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The actor lives, and its parent is no longer the zygote."""

    number: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is no actor."""

    number: int
    reason: str


ZygoteMessage = ZygoteReady | Forked | ForkFailed


def main(descriptor: int, modules: list[str]) -> int:
    """Import `modules`, then serve until the supervisor closes its end."""
    began = time.monotonic()
    for module in ("mesh.run", *modules):
        importlib.import_module(module)
    gc.collect()
    # What is here now is shared with all children until they write to it; a collection would touch every object.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as channel:
        channel.send(msgspec.msgpack.encode(ZygoteReady(import_s=time.monotonic() - began)))
        while frame := channel.recv(MAX_FRAME_BYTES):
            request = msgspec.msgpack.decode(frame, type=ForkRequest)
            channel.send(msgspec.msgpack.encode(_serve(request, channel)))
    return 0


def _serve(request: ForkRequest, channel: socket.socket) -> Forked | ForkFailed:
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        return ForkFailed(number=request.number, reason=f"the zygote has {num_threads} threads, a fork would hang")
    try:
        pid = _fork_twice(request, channel)
    except OSError as error:
        return ForkFailed(number=request.number, reason=str(error))
    return Forked(number=request.number, pid=pid)


def _fork_twice(request: ForkRequest, channel: socket.socket) -> int:
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        status = 1
        try:
            os.close(reader)
            actor = os.fork()
            if actor == 0:
                os.close(writer)
                channel.close()
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                status = main_of_fork(request.run, request.log)
            else:
                os.write(writer, actor.to_bytes(8, "little"))
                status = 0
        except BaseException:  # noqa: BLE001 - whatever it is must not run on as a second zygote
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Past the interpreter's end, which would run what the zygote registered for its own.
            os._exit(status)
    os.close(writer)
    try:
        _, status = os.waitpid(helper, 0)
        answer = os.read(reader, 8)
    finally:
        os.close(reader)
    if len(answer) != 8:
        raise OSError(f"the second fork failed (helper status {status})")
    return int.from_bytes(answer, "little")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
