"""`meshctl` for tests: each command in a process of its own, forked from one that has imported what commands need.

    test --argv, environment, stdout, stderr--> server --fork--> command --exit code--> test

A command by itself spends 0.5 s of a core on its imports, as long as the mesh beside it waits for that core; tests look
at `ps` some hundred times. `up`, and what is tested for its start, is started as people do.
"""

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

_REQUEST_BYTES = 1 << 20
_KILLED = -signal.SIGKILL


class CommandServer:
    """A process that forks commands, as long as this one lives."""

    def __init__(self):
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, "-m", "tests.process.commands", str(its.fileno())]
            # A test may have named its run directory to itself, and ends whoever has that: each command gets its own.
            environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
            self._process = subprocess.Popen(
                command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._socket = own

    def run(self, arguments, environment, timeout_s):
        """One command's `CompletedProcess`, with what it said as text. Raises `subprocess.TimeoutExpired`."""
        told, its = socket.socketpair()
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr, told:
            with its:
                request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()})
                descriptors = [its.fileno(), stdout.fileno(), stderr.fileno()]
                socket.send_fds(self._socket, [request.encode()], descriptors)
            told.settimeout(timeout_s)
            pid = array.array("i", told.recv(4))[0]
            try:
                answer = told.recv(4)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(arguments, timeout_s) from None
            code = array.array("i", answer)[0] if answer else _KILLED
            for stream in (stdout, stderr):
                stream.seek(0)
            return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())

    def close(self):
        self._socket.close()
        self._process.wait(10)


def serve(requests):
    """Fork until nobody can ask any more."""
    from cli import client  # noqa: F401 - what most commands import in the end
    from cli.main import main

    # Nobody waits for them here: each says by itself how it ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _run(json.loads(request), descriptors, main)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(request, descriptors, main):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer, stdout, stderr = descriptors
    told = socket.socket(fileno=answer)
    told.send(array.array("i", [os.getpid()]))
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["meshctl", *request["arguments"]]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        told.send(array.array("i", [code]))
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
