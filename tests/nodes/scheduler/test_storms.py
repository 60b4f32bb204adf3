"""Seeded storms over three groups: many requests, small pools, lost, repeated and late messages, dying workers.

A storm that fails says its seed; `run_storm(SEED)` plays it again.
"""

import random

import pytest

from nodes.request import TOKENS, VECTOR_KINDS
from tests.nodes.scheduler.scheduler_world import EDGE, World

POLICIES = ["fcfs", "longest_prefix", "depth_first", "shortest_first", "priority", "random"]


def run_storm(seed: int) -> World:
    draw = random.Random(seed)
    world = World(
        num_pages={"d": draw.choice([21, 26, 40, 80]), "p": draw.choice([21, 26, 40, 80]), "e": 40},
        context_length=80,
        max_running=draw.choice([2, 4, 16]),
        policy=draw.choice(POLICIES),
        pipeline_depth=draw.choice([1, 2, 2]),
        # Of its own draw: the storms are those that they were. Steps take no time here, so a plan has one or eight.
        plan_horizon_s=random.Random(f"horizon/{seed}").choice([0.0, 0.01]),
    )
    prefixes = [[2 + draw.randrange(900) for _ in range(40)] for _ in range(3)]
    for _ in range(draw.randrange(50, 400)):
        disturb(world, draw, prefixes)
    world.settle()
    world.advance(world.now + 40)
    world.settle()
    world.check()
    return world


def disturb(world: World, draw: random.Random, prefixes: list[list[int]]) -> None:
    what, links, requests = draw.random(), world.busy_links(), list(world.requests.values())
    if what < 0.2 and len(requests) < 40:
        prompt = draw.choice(prefixes)[: draw.randrange(1, 40)] + [
            2 + draw.randrange(900) for _ in range(draw.randrange(6))
        ]
        world.submit(
            prompt, draw.choice(["d", "e"]), prefill=draw.choice(["p", "p", "", "d"]), max_tokens=draw.randrange(30),
            min_tokens=draw.choice([0, 0, 5, 20]), stop_token_ids=draw.sample(range(2, 900), draw.choice([0, 0, 60])),
            ignore_eos=draw.random() < 0.3, priority=draw.randrange(3),
            kind=draw.choice([*VECTOR_KINDS, *[TOKENS] * 9]),
            client=draw.choice(["", "", "a", "b"]), weight=draw.choice([1, 1, 3]),
        )  # fmt: skip
    elif what < 0.8 and links:
        world.deliver(draw.choice(links))
    elif what < 0.83 and links:
        world.drop(draw.choice(links))
    elif what < 0.86 and links:
        world.repeat(draw.choice(links))
    elif what < 0.9:
        world.advance(world.now + draw.choice([0.01, 0.1, 1.0, 3.0]))
    elif what < 0.92 and requests:
        world.cancel(draw.choice(requests))
    elif what < 0.94 and requests:
        request = draw.choice(requests)
        position = draw.choice([None, 0, len(request.output_ids) // 2])
        world.resend(request, position, draw.choice(["", EDGE]))
    elif what < 0.95:
        world.restart_worker(draw.choice(["d", "p", "e"]))
    elif what < 0.96:
        world.agents["a-d"].fail_next = True
    elif what < 0.97:
        world.lose(draw.choice(["p", "a-d"]))
    elif what < 0.98:
        world.members()


FEW = [range(20)]
MANY = [pytest.param(range(first, first + 100), marks=pytest.mark.slow) for first in range(20, 3020, 100)]


@pytest.mark.parametrize("seeds", [*FEW, *MANY], ids=repr)
def test_storms(seeds: range) -> None:
    for seed in seeds:
        try:
            run_storm(seed)
        except BaseException:
            print(f"storm {seed}")
            raise
