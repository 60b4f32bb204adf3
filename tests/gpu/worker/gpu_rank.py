"""One rank of a group on a CUDA device, in a process of its own: `gpu_rank.py WHAT UNIQUE_ID RANK SIZE DEVICE [FILE]`.

`model` computes what the test computes itself, into FILE; `sums` sums for ever. Needs the test's `sys.path`.
"""

import sys

import torch
from gpu_running import build
from test_device_runner import IDS, text
from torch_running import logits_by_chunks

from nodes.worker.collectives import Collectives
from nodes.worker.cuda.nccl_collectives import NcclCollectivesMaker

SIZES = [16, 48, 33, 1, 22, 29, 1]


def computed(model: str, group: Collectives | None, device: str) -> dict[str, object]:
    """Logits of chunks, and tokens of decode steps without graphs and with them."""
    eager = build(model, "auto", group=group, device=device).runner
    logits = logits_by_chunks(eager, IDS, list(range(1, 11)), SIZES).float().cpu()
    tokens = text(eager, 3, 12)
    replayed = text(build(model, "auto", graphs=True, group=group, device=device).runner, 3, 12)
    return {"logits": logits, "tokens": torch.tensor(tokens), "replayed": torch.tensor(replayed)}


def main() -> None:
    what, unique_id, rank, size, device, *files = sys.argv[1:]
    torch.cuda.set_device(device)
    group = NcclCollectivesMaker(120.0).connect(bytes.fromhex(unique_id), int(rank), int(size), device)
    if what == "model":
        from safetensors.torch import save_file

        save_file(computed("random:tiny-qwen2", group, device), files[0])
        print("done", flush=True)
        return
    x = torch.ones(1 << 20, device=device)
    number = 0
    while True:
        group.all_reduce(x).fill_(1.0)
        torch.cuda.synchronize()
        number += 1
        if number == 10:
            print("running", flush=True)


if __name__ == "__main__":
    main()
