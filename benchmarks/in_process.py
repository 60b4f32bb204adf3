"""An `Engine` beside its own HTTP server: 32 prompts at once, and the time from a program's start to its first token.

Prompts: one mesh, asked in turns by an engine that is attached to it and over HTTP, each time with new prompts: as one
`POST /generate` of all, and as one of each on as many connections. Starts: `meshctl up` until it says ready, and then a
stream's first event; a new interpreter that makes an engine, until its stream's first event. In turns, too.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.server import mesh
from nodes import Engine

PROGRAM = """
import sys
from nodes import Engine
with Engine(sys.argv[1]) as engine:
    next(engine.generate("What is 37 + 45?", {"temperature": 0, "ignore_eos": True}, stream=True))
    print("first", flush=True)
    sys.stdin.read()
"""
BATCH = 32


def prompts(number: int, vocab: int) -> list[list[int]]:
    """New ids for each turn: no prefix is shared."""
    draw = random.Random(number)
    return [[draw.randrange(3, vocab) for _ in range(64)] for _ in range(BATCH)]


def post(port: int, body: Any) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def timed(ask: Callable[[], Any]) -> float:
    began = time.perf_counter()
    answers = ask()
    assert len(answers) == BATCH
    return time.perf_counter() - began


def batches(args: argparse.Namespace) -> None:
    """Prints seconds of each way, and the ratios of pairs."""
    params = {"max_new_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
    with mesh("--model", args.model) as (port, name), Engine.attach(name) as engine, ThreadPoolExecutor(BATCH) as pool:
        vocab = engine.config.vocab_size
        found: dict[str, list[float]] = {"engine": [], "one POST": [], "32 POSTs": []}
        for number in range(args.pairs + 1):
            ids = [prompts(3 * number + kind, vocab) for kind in range(3)]
            bodies = [{"input_ids": one, "sampling_params": params} for one in ids[2]]
            ways: dict[str, Callable[[], Any]] = {
                "engine": lambda ids=ids: engine.generate(input_ids=ids[0], sampling_params=params),
                "one POST": lambda ids=ids: post(port, {"input_ids": ids[1], "sampling_params": params}),
                "32 POSTs": lambda bodies=bodies: list(pool.map(lambda body: post(port, body), bodies)),
            }
            # Who is first changes, as does what the one before leaves to be done.
            for way in random.Random(number).sample(sorted(ways), len(ways)):
                seconds = timed(ways[way])
                if number:  # The first of a mesh are answered more slowly.
                    found[way].append(seconds)
    print(f"{'engine':<9} {statistics.median(found['engine']) * 1e3:7.0f} ms")
    for way in ("one POST", "32 POSTs"):
        ratios = [other / one for one, other in zip(found["engine"], found[way], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        print(
            f"{way:<9} {statistics.median(found[way]) * 1e3:7.0f} ms; times the engine's, {len(ratios)} pairs: "
            f"median {quarters[1]:.2f}, middle half {quarters[0]:.2f} to {quarters[2]:.2f}",
            flush=True,
        )


def start_of_server(model: str) -> float:
    began = time.perf_counter()
    with mesh("--model", model, look_s=0.01) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"text": "What is 37 + 45?", "sampling_params": {"temperature": 0, "ignore_eos": True}, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().readline()
        seconds = time.perf_counter() - began
        connection.close()
    return seconds


def start_of_engine(model: str) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"first\n"
        return time.perf_counter() - began


def starts(args: argparse.Namespace) -> None:
    """Prints seconds of both, and how much later an engine's first token is."""
    pairs = [(start_of_server(args.model), start_of_engine(args.model)) for _ in range(args.starts)]
    later = [engine - server for server, engine in pairs]
    print(
        f"start to first token: up {statistics.median(server for server, _ in pairs):.2f} s, "
        f"engine {statistics.median(engine for _, engine in pairs):.2f} s; later by, median of {len(pairs)} pairs: "
        f"{statistics.median(later):+.2f} s ({min(later):+.2f} to {max(later):+.2f})"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--starts", type=int, default=5)
    args = parser.parse_args()
    if args.pairs:
        batches(args)
    if args.starts:
        starts(args)


if __name__ == "__main__":
    main()
