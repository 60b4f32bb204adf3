"""A process of its own that makes or uses a pool on a CUDA device: started by the tests beside it, told what to do on
stdin, one command a line, answers each with one line.

    make NAME NUM_PAGES INCARNATION   make a pool, as a kv_agent does; answers its path
    open PATH                         open a pool and its pages, as a worker does; answers the number of bytes
    fill SEED                         write random bytes; answers their hash
    hash                              answers the hash of all bytes
    tables PATH                       open a pool as a scheduler does; answers whether CuPy was loaded
    end                               close what is open, and end
"""

import sys
from pathlib import Path
from typing import Any

from kvstore.errors import KVError
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import PagePool, PoolInfo, ShmHost
from tests.gpu.gpu_pool import LAYOUT, bytes_at, digest, put_bytes, random_bytes


class PoolProcess:
    def __init__(self, directory: str) -> None:
        self.tables = ShmHost(Path(directory))
        self.host = CudaHost(self.tables)
        self.pool: PagePool | None = None

    def make(self, name: str, num_pages: str, incarnation: str) -> str:
        info = PoolInfo(
            group=name, num_pages=int(num_pages), layout=LAYOUT, incarnation=int(incarnation), device="cuda:0"
        )
        self.pool = self.host.create(name, info)
        return self.pool.path

    def open(self, path: str) -> str:
        self.pool = self.host.open(path, writable=True)
        return str(self.pool.device_pages.num_bytes)

    def fill(self, seed: str) -> str:
        pages = self._pages()
        data = random_bytes(int(seed), pages.num_bytes)
        put_bytes(pages, data)
        return digest(data)

    def hash(self) -> str:
        return digest(bytes_at(self._pages()))

    def tables_only(self, path: str) -> str:
        pool = self.tables.open(path, writable=True)
        pool.table().read(1)
        pool.close()
        return "loaded" if "cupy" in sys.modules else "not loaded"

    def end(self) -> str:
        if self.pool is not None:
            self.pool.close()
        return "ended"

    def _pages(self) -> Any:
        return self.pool.device_pages


def main() -> None:
    process = PoolProcess(sys.argv[1])
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            answer = getattr(process, {"tables": "tables_only"}.get(command, command))(*arguments)
        except KVError as error:
            answer = f"error {error.code} {error.message}"
        print(answer, flush=True)
        if command == "end":
            return


if __name__ == "__main__":
    main()
