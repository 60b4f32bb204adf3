"""Times draws that need logits, and logprobs, by the native library beside torch: no model, one process.

Medians of turns, in milliseconds for all rows; of CPU time if one thread computes, since others may have the core
meanwhile. The first figure of each line is the time to read the rows' bytes once,
by torch's `amax`. Peaked rows have an entropy of about 2 bits, flat ones of 16.

    python -m benchmarks.row_pass [--words 151936] [--rows 1,16] [--threads 1] [--turns 15] [--kernels auto]
"""

import argparse
import os
import statistics
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

# Many turns in one thread: others would only spin beside it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from nodes.asks.edits import RowEdits, RowReads, mask_of
from nodes.request import Sampling
from nodes.worker.draw.measuring import measured, payloads
from nodes.worker.draw.sampler import PLAIN, Draw, most_likely, sample
from nodes.worker.ops.native.builds import choose_library
from nodes.worker.ops.native.rows import NativeRows


class Case(NamedTuple):
    """How all rows draw, and what is read of them."""

    name: str
    draw: Draw = PLAIN
    reads: RowReads | None = None
    is_peaked: bool = True


def cases(words: int) -> list[Case]:
    """What clients send, and what a grammar or penalties make of it."""
    grammar, penalties = RowEdits(), RowEdits()
    # Few of the words, all over the vocabulary, and one of its ends whole, as in a string of a schema.
    grammar.mask = mask_of([*range(0, words, 97), *range(words // 2)], words)
    penalties.add = {7 * at % words: -0.1 * (at % 9) for at in range(1000)}
    default = Sampling(temperature=0.7, top_p=0.95)
    return [
        Case("logprobs, top 5", reads=RowReads(5)),
        Case("logprobs, top 20, flat", reads=RowReads(20), is_peaked=False),
        Case("grammar", Draw(PLAIN.sampling, 0, grammar)),
        Case("grammar, temperature 0.7, top_p 0.95", Draw(default, 0, grammar)),
        Case("penalties of 1,000 tokens", Draw(PLAIN.sampling, 0, penalties)),
        Case("penalties, temperature 0.7, top_p 0.95", Draw(default, 0, penalties)),
        Case("temperature 0.7, top_p 0.95", Draw(default, 0)),
        Case("temperature 0.7, top_p 0.95, flat", Draw(default, 0), is_peaked=False),
        Case("temperature 1", Draw(Sampling(), 0)),
        Case("temperature 0.6, top_k 20, top_p 0.95", Draw(Sampling(temperature=0.6, top_k=20, top_p=0.95), 0)),
        Case("top_k 50, flat", Draw(Sampling(top_k=50), 0), is_peaked=False),
        Case("min_p 0.05, flat", Draw(Sampling(min_p=0.05), 0), is_peaked=False),
    ]


def medians(turns: int, num_threads: int, *several: Callable[[], object]) -> list[float]:
    """Milliseconds of each, called in turns."""
    now = time.thread_time if num_threads == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in several]
    for _ in range(turns):
        for one, found in zip(several, times, strict=True):
            # Untimed, or each would run with what the one before has left in the caches.
            one()
            start = now()
            one()
            found.append((now() - start) * 1e3)
    return [statistics.median(found) for found in times]


def rows_of(count: int, words: int, *, is_peaked: bool) -> torch.Tensor:
    """Logits, of the same seed each time."""
    rows = torch.randn(count, words, generator=torch.Generator().manual_seed(1))
    if is_peaked:
        # The share of the others together is about 2 %.
        rows[:, 1000:1004] = torch.tensor([16.0, 15.5, 15.0, 14.5])
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=151_936)
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    library, note = choose_library(args.kernels)
    if library is None:
        raise SystemExit(f"no native kernels here: {note}")
    torch.set_num_threads(args.threads)
    library.set_threads(args.threads)
    native = NativeRows(library)
    print(f"{library.name}, {args.threads} threads, {args.words:,} words; ms of all rows: read, native, torch")
    for count in map(int, args.rows.split(",")):
        for case in cases(args.words):
            compare(native, case, rows_of(count, args.words, is_peaked=case.is_peaked), args.turns)


def compare(native: NativeRows, case: Case, rows: torch.Tensor, turns: int) -> None:
    """Prints a line, with how many tokens and payloads of the two are equal."""
    count = len(rows)
    draws = [case.draw._replace(position=at) for at in range(count)]
    altered = {} if case.draw.is_plain else dict(enumerate(draws))
    reads = {} if case.reads is None else dict.fromkeys(range(count), case.reads)
    # The head finds the most likely tokens of its own logits.
    likely = array("i", most_likely(rows)[1].tolist())

    def by_library() -> tuple[list[int], list[bytes]]:
        tokens, lines = native.draw(rows, altered, reads, likely)
        return tokens, [] if lines is None else payloads(lines, [*reads.values()])

    def by_torch() -> tuple[list[int], list[bytes]]:
        tokens = sample(rows, draws).tolist() if altered else likely.tolist()
        if not reads:
            return tokens, []
        return tokens, payloads(measured(rows, torch.tensor(tokens), draws, [*reads.values()]), [*reads.values()])

    with torch.inference_mode():
        (tokens, extras), expected = by_library(), by_torch()
        equal = sum(map(int.__eq__, tokens, expected[0])), sum(map(bytes.__eq__, extras, expected[1]))
        read, ours, theirs = medians(turns, torch.get_num_threads(), lambda: rows.amax(-1), by_library, by_torch)
    print(f"{count:3} {case.name:40} {read:7.3f} {ours:8.3f} {theirs:8.2f}  {theirs / ours:5.1f} times, equal {equal}")


if __name__ == "__main__":
    main()
