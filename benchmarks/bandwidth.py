"""What the machine itself can do: the limits that serving figures are compared with."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def read_gb_s(num_threads: int = 2, num_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Best of `repeats`: all threads together sum float32 data that does not fit into a cache."""
    data = [np.ones(num_bytes // 4 // num_threads, dtype=np.float32) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, data))
            best = max(best, num_bytes / (time.perf_counter() - start) / 1e9)
    return best
