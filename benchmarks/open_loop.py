"""Requests that arrive on their own, as users' do: Poisson arrivals at a given rate, at one server or at two in turns.

A closed loop sends its next request only after the last answer, so a server that stalls gets fewer requests; here they
come all the same, and the stall shows in TTFT and in the gaps between tokens (ITL). Two servers get the same prompts at
the same times, one run after the other, and the ratios of these pairs are printed.

    python -m benchmarks.open_loop http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 2 --model NAME
"""

import argparse
import asyncio
import random
import statistics
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.load import Sample, stream_completion


class Row(NamedTuple):
    """One run at one server. `late_ms`: the client's own worst delay in sending a request that was due."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    late_ms: float


def arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: gaps are exponential with mean `1 / rate`."""
    draw = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for _ in range(num_requests):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def percentile(values: list[float], share: float) -> float:
    """The value at index `share * len(values)` of the sorted values; NaN if there are none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]


def prompt_body(model: str, num_prompt: int, num_output: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """Token ids that no other request has, so that no prefix cache helps."""
    draw = random.Random(seed)
    ids = [draw.randrange(10, vocabulary) for _ in range(num_prompt)]
    return {"model": model, "prompt": ids, "max_tokens": num_output, "temperature": 0, "ignore_eos": True}


async def run(url: str, due_s: list[float], bodies: list[dict[str, Any]]) -> Row:
    """Send each body when it is due, whatever happens to the others. Raises RuntimeError unless all get a whole 200."""
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    late_s: list[float] = []
    start = time.perf_counter()

    async def request(due: float, body: dict[str, Any]) -> Sample:
        await asyncio.sleep(start + due - time.perf_counter())
        late_s.append(time.perf_counter() - start - due)
        # Timed from when it was due: a user also waits while the client itself is late.
        return await stream_completion(host, port, body, Sample(start + due))

    samples = await asyncio.gather(*map(request, due_s, bodies))
    wall_s = time.perf_counter() - start
    ttft = [1e3 * (one.event_times_s[0] - one.start_s) for one in samples if one.event_times_s]
    gaps = [1e3 * (b - a) for one in samples for a, b in zip(one.event_times_s, one.event_times_s[1:], strict=False)]
    return Row(
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        sum(one.num_tokens for one in samples) / wall_s,
        1e3 * max(late_s),
    )


async def measure(args: argparse.Namespace) -> None:
    """A line per run, then, with two servers, least, median and greatest ratio of the pairs."""
    rows: dict[str, list[Row]] = {url: [] for url in args.urls}
    print(f"{'server':<28}{'TTFT p50':>10}{'p99':>9}{'ITL p50':>10}{'p99':>9} ms{'tok/s':>9}{'late':>8} ms")
    for pair in range(args.pairs):
        due_s = arrivals(args.rate, args.requests, args.seed + pair)
        bodies = [
            prompt_body(args.model, args.prompt, args.output, args.vocabulary, (args.seed + pair) * 100_000 + n)
            for n in range(args.requests)
        ]
        # Each is first as often as second, so that warming up, or other work on the machine, affects both alike.
        for url in args.urls[:: 1 if pair % 2 else -1]:
            row = await run(url, due_s, bodies)
            rows[url].append(row)
            print(
                f"{url:<28}{row.ttft_p50_ms:>10.0f}{row.ttft_p99_ms:>9.0f}{row.itl_p50_ms:>10.1f}"
                f"{row.itl_p99_ms:>9.1f}{row.tokens_per_s:>12.1f}{row.late_ms:>8.1f}",
                flush=True,
            )
    if len(args.urls) == 2:
        pairs = list(zip(*rows.values(), strict=True))
        for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_s"):
            ratios = [getattr(one, name) / getattr(other, name) for one, other in pairs]
            print(f"{name:<14} first / second {min(ratios):.2f} / {statistics.median(ratios):.2f} / {max(ratios):.2f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", help="one server, or two to compare")
    parser.add_argument("--model", required=True, help="the model's name on the servers")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--requests", type=int, default=64, help="requests per run")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
