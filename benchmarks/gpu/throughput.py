"""nano-vllm's benchmark (github.com/GeeeekExplorer/nano-vllm, bench.py): 256 sequences at once, one number.

    python -m benchmarks.gpu.throughput [--mesh]

Prompts of 100 to 1,024 random tokens, outputs of 100 to 1,024 at temperature 0.6, `random.seed(0)`: 133,966 output
tokens, Qwen3-0.6B shape. By default one loop drives the worker's runner, and fills each step with a row of every
running sequence and chunks of those that wait; with `--mesh` requests go to a whole mesh on the device over HTTP.
Published elsewhere, on other devices: nano-vllm 1,434 tok/s (RTX 4070 laptop), vLLM 8,588 (A800).
"""

import argparse
import json
import random
import time
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu.figures import say
from benchmarks.gpu.loaded import Loaded, load, unload
from benchmarks.gpu.served import ask, served
from kvstore.layout import KVLayout
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep

MODEL = "random:qwen3-0.6b"


def workload(num_sequences: int = 256, longest: int = 1024) -> list[tuple[list[int], int]]:
    """Prompts and numbers of output tokens, in the order in which nano-vllm draws them."""
    draw = random.Random(0)
    shortest = min(100, longest)
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(shortest, longest))] for _ in range(num_sequences)]
    return [(prompt, draw.randint(shortest, longest)) for prompt in prompts]


class Sequence:
    """One request on its way: `done` positions are in its pages when the steps so far have run."""

    def __init__(self, number: int, prompt: list[int], num_output: int, pages: "array[int]") -> None:
        self.prompt = prompt
        self.num_output = num_output
        self.pages = pages
        self.opened = OpenSequence(Open(0, number, len(prompt), Sampling(temperature=0.6, seed=number)))
        self.done = 0
        self.row = -1
        """Its row in the step before, if it drew there."""

    @property
    def num_drawn(self) -> int:
        """Output tokens drawn by the steps so far."""
        return max(0, self.done - len(self.prompt) + 1)

    @property
    def is_over(self) -> bool:
        """Whether no further step is needed."""
        return self.num_drawn >= self.num_output


class Batcher:
    """Continuous batching, all requests admitted from the start: decode rows first, then chunks up to the limit."""

    def __init__(self, requests: list[tuple[list[int], int]], layout: KVLayout, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._step = 0
        next_page = 1
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        for number, (prompt, num_output) in enumerate(requests):
            count = layout.num_pages_for(len(prompt) + num_output)
            pages = array("i", range(next_page, next_page + count))
            next_page += count
            self.waiting.append(Sequence(number, [token % 1000 for token in prompt], num_output, pages))

    def next_step(self) -> RunnableStep | None:
        """The step after all earlier ones, which need not have ended; None if there is no more to do."""
        rows: list[RunnableRow] = []
        tokens, page_ids = array("i"), array("i")
        self.running = [one for one in self.running if not one.is_over]
        chosen = [(one, 1) for one in self.running]
        room = self._step_tokens - len(chosen)
        while self.waiting and room > 0:
            one = self.waiting[0]
            count = min(room, len(one.prompt) - one.done)
            chosen.append((one, count))
            room -= count
            if one.done + count < len(one.prompt):
                break
            self.running.append(self.waiting.popleft())
        for index, (one, count) in enumerate(chosen):
            end = one.done + count
            draws = end >= len(one.prompt)
            is_decode = one.done >= len(one.prompt)
            rows.append(
                RunnableRow(
                    index, one.opened, one.done, count, len(tokens), len(page_ids), int(draws),
                    one.row if is_decode else -1,
                )
            )  # fmt: skip
            tokens.extend([-1] if is_decode else one.prompt[one.done : end])
            page_ids.extend(one.pages)
            one.done, one.row = end, index
        self._step += 1
        return RunnableStep(self._step, Rows.of(rows), tokens, page_ids) if rows else None


def run_alone(loaded: Loaded, requests: list[tuple[list[int], int]], step_tokens: int) -> tuple[float, int]:
    """Seconds, and the number of steps."""
    batcher, before, num_steps = Batcher(requests, loaded.layout, step_tokens), None, 0
    num_drawn = 0
    start = time.perf_counter()
    while (step := batcher.next_step()) is not None:
        launched = loaded.runner.launch(step)
        if before is not None:
            num_drawn += count_drawn(loaded, before)
        before = launched
        num_steps += 1
    num_drawn += count_drawn(loaded, before)
    taken = time.perf_counter() - start
    assert num_drawn == sum(count for _, count in requests), "not every sequence got its tokens"
    return taken, num_steps


def count_drawn(loaded: Loaded, launched: object) -> int:
    outcome = loaded.runner.finish(launched)
    assert not outcome.errors, outcome.errors[0]
    return sum(token >= 0 for token in outcome.token_ids)


def run_mesh(model: str, requests: list[tuple[list[int], int]], device: str) -> float:
    """Seconds, with a mixed group and all other roles."""

    def complete(request: tuple[list[int], int]) -> int:
        with ask(port, model, *request, temperature=0.6, seed=1) as response:
            return json.loads(response.read())["usage"]["completion_tokens"]

    with served(model, device, "--mixed", "1") as port:
        complete((requests[0][0], 8))
        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as clients:
            counts = list(clients.map(complete, requests))
        taken = time.perf_counter() - start
    assert counts == [count for _, count in requests], "not every request got its tokens"
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="store_true", help="measure a whole mesh instead of one runner")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--step-tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    requests = workload(args.sequences, args.longest)
    num_output = sum(count for _, count in requests)
    beside = f"{num_output:,} output tokens; published elsewhere: vLLM 8,588 on an A800"
    if args.mesh:
        taken = run_mesh(args.model, [([token % 1000 for token in prompt], n) for prompt, n in requests], args.device)
        say("nano-vllm benchmark, whole mesh", f"{num_output / taken:,.0f} tok/s", beside)
        return
    room = sum(len(prompt) + count + 16 for prompt, count in requests)
    loaded = load(args.model, room, args.step_tokens, args.device)
    run_alone(loaded, [(prompt, min(count, 16)) for prompt, count in requests[:8]], args.step_tokens)
    taken, num_steps = run_alone(loaded, requests, args.step_tokens)
    say("nano-vllm benchmark, runner", f"{num_output / taken:,.0f} tok/s", f"{beside}; {num_steps} steps")
    unload(loaded)


if __name__ == "__main__":
    main()
