"""Embeddings per second of two servers, in turns: the first one is ours, the second a peer with the same model.

Each call of `/v1/embeddings` brings 32 inputs of 128 token ids that were never sent before, so that no cache helps; or
with `--each` 32 calls at once bring one each. Both servers get the same ids in a turn.

    python -m benchmarks.vectors http://127.0.0.1:8000 http://127.0.0.1:8001
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

_BASE64: Final = "base64"


def embed(url: str, model: str, inputs: list[list[int]]) -> list[str]:
    body = {"model": model, "input": inputs, "encoding_format": _BASE64}
    request = urllib.request.Request(
        f"{url}/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return [one["embedding"] for one in json.loads(response.read())["data"]]


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return json.loads(response.read())["data"][0]["id"]


def rate(url: str, model: str, inputs: list[list[int]], pool: ThreadPoolExecutor | None) -> float:
    """Inputs per second."""
    began = time.perf_counter()
    if pool is None:
        num = len(embed(url, model, inputs))
    else:
        calls = [pool.submit(embed, url, model, [one]) for one in inputs]
        num = sum(len(call.result()) for call in calls)
    assert num == len(inputs), "a vector for each input"
    return num / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--inputs", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=30_000, help="ids are below this; lower than both vocabularies")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--each", action="store_true", help="a call for each input, all at once")
    args: Any = parser.parse_args()
    # Another seed each time: a server that caches prefixes would have the inputs of the last run.
    draw = random.Random()
    models = [model_of(url) for url in args.urls]
    found: list[list[float]] = [[] for _ in args.urls]
    with ThreadPoolExecutor(args.inputs) as threads:
        pool = threads if args.each else None
        for turn in range(args.pairs + 1):
            inputs = [[draw.randrange(1000, args.vocab) for _ in range(args.tokens)] for _ in range(args.inputs)]
            rates = [rate(url, model, inputs, pool) for url, model in zip(args.urls, models, strict=True)]
            # The first turn warms both up.
            for own, one in zip(found, rates, strict=True):
                own += [one] * (turn > 0)
    for url, rates in zip(args.urls, found, strict=True):
        print(f"{url}: {statistics.median(rates):.2f} inputs/s, {min(rates):.2f} to {max(rates):.2f}")
    for rates in found[1:]:
        ratios = [own / other for own, other in zip(found[0], rates, strict=True)]
        print(f"ratio {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} ({args.pairs} pairs)")


if __name__ == "__main__":
    main()
