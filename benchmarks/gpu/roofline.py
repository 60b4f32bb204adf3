"""What the device itself can do: the speed of a copy and of a large bf16 product.

    python -m benchmarks.gpu.roofline

Other benchmarks measure the same in their own run and say what fraction of it they reach. Copies count bytes read and
bytes written. A decode step cannot be shorter than reading the weights and the KV of its sequences once, nor a prefill
shorter than its multiplications.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.gpu.figures import say
from benchmarks.worker_steps import parameters
from kvstore.layout import ITEM_BYTES
from nodes.model_spec import ModelSpec

COPY_BYTES = 2 << 30
MATRIX_ROWS = 8192


class Roofline(NamedTuple):
    """Measured limits: bytes/s of memory, and multiplications and additions/s of a bf16 product."""

    bytes_s: float
    flop_s: float

    def decode_tokens_s(self, spec: ModelSpec, batch: int, context: int) -> float:
        """Tokens/s of decode steps with `batch` sequences of `context` positions."""
        read, _ = parameters(spec)
        dtype = spec.compute_dtype()
        step_bytes = read * ITEM_BYTES[dtype] + batch * context * spec.kv_layout().token_bytes
        return batch * self.bytes_s / step_bytes

    def prefill_tokens_s(self, spec: ModelSpec, num_tokens: int) -> float:
        """Tokens/s of one prompt; attention sees half of all pairs."""
        _, multiplied = parameters(spec)
        attention = 2 * num_tokens * num_tokens * spec.num_heads * spec.head_dim * spec.num_layers
        return num_tokens * self.flop_s / (2 * multiplied * num_tokens + attention)


def measure(device: str, copy_bytes: int = COPY_BYTES, rows: int = MATRIX_ROWS) -> Roofline:
    """The best of some repeats; takes a fraction of a second."""
    import torch

    limits = Roofline(2 * copy_bytes / copy_seconds(device, copy_bytes), 2 * rows**3 / product_seconds(device, rows))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return limits


def copy_seconds(device: str, num_bytes: int) -> float:
    """Seconds for one copy of `num_bytes` within the device's memory."""
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return best_seconds(device, lambda: target.copy_(source), 20)


def product_seconds(device: str, rows: int) -> float:
    """Seconds for one product of two square bf16 matrices of random numbers: zeros would let the clock rise."""
    import torch

    a = torch.randn(rows, rows, device=device).to(torch.bfloat16)
    b = torch.randn(rows, rows, device=device).to(torch.bfloat16)
    return best_seconds(device, lambda: a @ b, 20)


def best_seconds(device: str, work: Callable[[], Any], repeats: int) -> float:
    """The shortest of `repeats` times of `work`, by device events, after three that warm up."""
    import time

    import torch

    times: list[float] = []
    for number in range(repeats + 3):
        if device.startswith("cuda"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            work()
            taken = time.perf_counter() - start
        if number >= 3:
            times.append(taken)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--rows", type=int, default=MATRIX_ROWS)
    args = parser.parse_args()
    limits = measure(args.device, args.copy_bytes, args.rows)
    say("copy in device memory", f"{limits.bytes_s / 1e9:,.0f} GB/s", "bytes read and bytes written")
    say(f"bf16 product of {args.rows} x {args.rows}", f"{limits.flop_s / 1e12:,.1f} TFLOP/s")


if __name__ == "__main__":
    main()
