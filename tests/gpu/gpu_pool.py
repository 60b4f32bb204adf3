"""What the tests of pools on a device share with the processes that they start: a layout, and bytes to and from it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy

from kvstore.layout import KVLayout
from kvstore.pool.device import DevicePages

ROOT = Path(__file__).parents[2]

# Qwen3-0.6B: 1.75 MiB a page.
LAYOUT = KVLayout(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16)


def random_bytes(seed: int, num_bytes: int) -> bytes:
    return numpy.random.default_rng(seed).bytes(num_bytes)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def bytes_at(pages: DevicePages, offset: int = 0, num_bytes: int | None = None) -> bytes:
    """Copy from the device."""
    from cupy.cuda import runtime

    size = pages.num_bytes - offset if num_bytes is None else num_bytes
    host = numpy.empty(size, dtype=numpy.uint8)
    runtime.setDevice(pages.device)
    runtime.memcpy(host.ctypes.data, pages.pointer + offset, size, runtime.memcpyDefault)
    return host.tobytes()


def put_bytes(pages: DevicePages, data: bytes, offset: int = 0) -> None:
    """Copy to the device, and wait until it is there."""
    from cupy.cuda import runtime

    host = numpy.frombuffer(data, dtype=numpy.uint8)
    runtime.setDevice(pages.device)
    runtime.memcpy(pages.pointer + offset, host.ctypes.data, len(data), runtime.memcpyDefault)
    runtime.deviceSynchronize()


class Child:
    """A program of this folder in a new interpreter, never a fork, since this process has used CUDA.

    It is told what to do on stdin, one command a line, and answers each with one line.
    """

    def __init__(self, program: str, *arguments: object, **variables: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | variables,
        )

    def tell(self, *words: object) -> None:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        answer = self.process.stdout.readline().strip()
        assert answer, "the process died"
        return answer

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def end(self) -> None:
        if self.process.poll() is None:
            self.ask("end")
        self._reap()

    def _reap(self) -> None:
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()
