"""A rank of its own process, without torch: started by `test_nccl_one_device.py`, told what to do on stdin.

id                           answers a unique id in hexadecimal
link ID RANK                 makes a half with 4 MiB of device memory; answers `ready`, or why not
fill SEED                    random bytes into that memory; answers their hash
hash                         answers the hash of that memory
move NUMBER OFFSET:SIZE …    begins a transfer; answers `begun`
moved                        waits for its end; answers its number, or why not
abort                        answers the seconds until nothing runs any more
sum COUNT                    all ranks add bfloat16 numbers, rank + 1 each; answers the first and the last
gather COUNT                 all ranks collect COUNT bytes of each other; answers the bytes' hash
end
"""

import sys
import time
from collections.abc import Callable

import numpy

from kvstore.errors import KVError
from kvstore.pool.cuda.memory import DeviceMemory, load_cupy_memory
from kvstore.pool.device import DevicePages
from kvstore.transfer.paired.link import Broken, Moved, News, Ready, Stopped
from kvstore.transfer.paired.nccl import NcclLink, NcclLinks
from tests.gpu.gpu_pool import bytes_at, digest, put_bytes, random_bytes

SIZE = 4 << 20
LIMIT_S = 30.0


class RankProcess:
    def __init__(self) -> None:
        self.links = NcclLinks()
        self.memory: DeviceMemory = load_cupy_memory()
        self.pages = DevicePages(0, self.memory.allocate(0, SIZE), SIZE)
        self.link_: NcclLink | None = None
        self.rank = 0

    def id(self) -> str:
        return self.links.unique_id().hex()

    def link(self, unique_id: str, rank: str) -> str:
        self.rank = int(rank)
        self.link_ = self.links.link("cuda:0", bytes.fromhex(unique_id), self.rank)
        self.link_.begin()
        return self._until(lambda news: "ready" if isinstance(news, Ready) else "")

    def fill(self, seed: str) -> str:
        data = random_bytes(int(seed), SIZE)
        put_bytes(self.pages, data)
        return digest(data)

    def hash(self) -> str:
        return digest(bytes_at(self.pages))

    def move(self, number: str, *parts: str) -> str:
        pairs = [part.split(":") for part in parts]
        self.link_.move(int(number), self.pages, [(int(offset), int(size)) for offset, size in pairs])
        return "begun"

    def moved(self) -> str:
        return self._until(lambda news: str(news.number) if isinstance(news, Moved) else "")

    def abort(self) -> str:
        begin = time.monotonic()
        self.link_.abort()
        said = self._until(lambda news: "stopped" if isinstance(news, Stopped) else "", ignores_broken=True)
        return f"{time.monotonic() - begin:.2f}" if said == "stopped" else said

    def sum(self, count: str) -> str:
        """bfloat16 by its bits: the upper half of a float32."""
        import cupy
        from cupy.cuda import nccl

        numbers = (numpy.full(int(count), self.rank + 1, numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)
        values = cupy.asarray(numbers)
        communicator, stream = self._communicator()
        cupy.cuda.runtime.deviceSynchronize()
        communicator.allReduce(
            values.data.ptr, values.data.ptr, int(count), nccl.NCCL_BFLOAT16, nccl.NCCL_SUM, stream.ptr
        )
        stream.synchronize()
        found = (values.get().astype(numpy.uint32) << 16).view(numpy.float32)
        return f"{found[0]:g} {found[-1]:g}"

    def gather(self, count: str) -> str:
        from cupy.cuda import nccl

        communicator, stream = self._communicator()
        size = int(count)
        target = self.memory.allocate(0, 2 * size)
        communicator.allGather(self.pages.pointer, target, size, nccl.NCCL_INT8, stream.ptr)
        stream.synchronize()
        found = digest(bytes_at(DevicePages(0, target, 2 * size)))
        self.memory.free(0, target)
        return found

    def end(self) -> str:
        if self.link_ is not None:
            self.link_.stop()
        self.memory.free(0, self.pages.pointer)
        return "ended"

    def _communicator(self) -> tuple[object, object]:
        return self.link_._communicator, self.link_._stream

    def _until(self, wanted: Callable[[News], str], *, ignores_broken: bool = False) -> str:
        ends_at = time.monotonic() + LIMIT_S
        while time.monotonic() < ends_at:
            for news in self.link_.news():
                if wanted(news):
                    return wanted(news)
                if isinstance(news, Broken) and not ignores_broken:
                    return f"broken {news.message}"
            time.sleep(0.001)
        return f"nothing in {LIMIT_S:.0f} s"


def main() -> None:
    process = RankProcess()
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            answer = getattr(process, command)(*arguments)
        except (KVError, RuntimeError) as error:
            answer = f"error {error}"
        print(answer.replace("\n", " "), flush=True)
        if command == "end":
            return


if __name__ == "__main__":
    main()
