"""One rank of a group in a process of its own: `rank_process.py WHAT UNIQUE_ID RANK SIZE`. Prints what it found.

`sums` sums for ever; `decode` computes a few steps of a model.
"""

import sys
from pathlib import Path

import torch

from nodes.worker.errors import CollectiveFailed
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.parallel.shm_collectives import ShmCollectivesMaker

LOST = 3


def sums(group: Collectives) -> None:
    number = 0
    while True:
        assert group.all_reduce(torch.full((4, 4), float(number)))[0, 0] == number * group.size
        number += 1
        if number == 10:
            print("running", flush=True)


def decode(group: Collectives) -> None:
    # A program's own folder is on its path, the one that has `tests` in it is not.
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.nodes.worker.cuda.rank_running import MODEL, decoded, rank_runner

    print(decoded(rank_runner(MODEL, group), 4), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    what, unique_id, rank, size = sys.argv[1:]
    group = ShmCollectivesMaker(60.0).connect(bytes.fromhex(unique_id), int(rank), int(size), "cpu")
    try:
        {"sums": sums, "decode": decode}[what](group)
    except CollectiveFailed as error:
        print(error, flush=True)
        sys.exit(LOST)


if __name__ == "__main__":
    main()
