"""Scenarios in which most clients have their prompts read: told chunk by chunk, lost, told again, begun anew."""

import random
from collections import Counter
from dataclasses import replace

from tests.simulation import scenario
from tests.simulation.scenario import Client


def draw_reads(seed: int, clients: list[Client]) -> list[Client]:
    """Two of three clients want to know of their prompts; the others leave theirs in the caches."""
    draw = random.Random(f"prompts/{seed}")
    return [replace(client, prompt_top=draw.choice([-1, 0, 3])) for client in clients]


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    return scenario.run_seed(seed, draw_reads, "prompts")
