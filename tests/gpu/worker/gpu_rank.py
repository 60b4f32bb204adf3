"""One rank of a group on a CUDA device, in a process of its own: `gpu_rank.py WHAT RANK SIZE DEVICE [FILE]`.

Rank 0 prints the unique id, the others read it. `model` computes what the test computes itself, into FILE; `sums` sums
for ever; `lose` sums until it is told to go on without the others, and says what became of it. Needs the test's
`sys.path`.
"""

import sys
import time

import torch

from nodes.worker.cuda.nccl_collectives import NcclCollectivesMaker
from nodes.worker.errors import CollectiveFailed
from nodes.worker.parallel.collectives import Collectives
from tests.gpu.worker.gpu_running import build
from tests.nodes.worker.cuda.test_device_runner import IDS, text
from tests.nodes.worker.torch_running import logits_by_chunks

MODEL = "random:tiny-qwen2"
SIZES = [16, 48, 33, 1, 22, 29, 1]
HANG_S = 2.0


def computed(group: Collectives | None, device: str) -> dict[str, torch.Tensor]:
    """Logits of chunks, and tokens of decode steps without graphs and with them."""
    eager = build(MODEL, "auto", group=group, device=device).runner
    logits = logits_by_chunks(eager, IDS, list(range(1, 11)), SIZES).float().cpu()
    tokens = text(eager, 3, 12)
    replayed = text(build(MODEL, "auto", graphs=True, group=group, device=device).runner, 3, 12)
    return {"logits": logits, "tokens": torch.tensor(tokens), "replayed": torch.tensor(replayed)}


def sums(group: Collectives, x: torch.Tensor, count: int) -> None:
    for _ in range(count):
        group.all_reduce(x.fill_(1.0))
    torch.cuda.synchronize()
    assert float(x.mean()) == group.size


def lose(group: Collectives, x: torch.Tensor) -> None:
    sums(group, x, 20)
    print("running", flush=True)
    sys.stdin.readline()
    # The first may still have been begun by the other.
    for _ in range(3):
        group.all_reduce(x)
    done = torch.cuda.Event()
    done.record()
    time.sleep(HANG_S)
    hung = not done.query()
    begin = time.monotonic()
    group.abort()
    done.synchronize()
    try:
        group.check()
    except CollectiveFailed:
        assert float(torch.ones(10, device=x.device).sum()) == 10
        print(f"{'hung' if hung else 'ended'}, aborted in {time.monotonic() - begin:.2f} s", flush=True)


def main() -> None:
    what, rank, size, device, *files = sys.argv[1:]
    torch.cuda.set_device(device)
    maker = NcclCollectivesMaker(120.0)
    if rank == "0":
        unique_id = maker.unique_id()
        print(unique_id.hex(), flush=True)
    else:
        unique_id = bytes.fromhex(sys.stdin.readline())
    group = maker.connect(unique_id, int(rank), int(size), device)
    x = torch.ones(1 << 20, device=device)
    if what == "model":
        from safetensors.torch import save_file

        save_file(computed(group, device), files[0])
        group.check()
        print("done", flush=True)
    elif what == "lose":
        lose(group, x)
    else:
        while True:
            sums(group, x, 20)


if __name__ == "__main__":
    main()
