"""How fast everything is in one simulated mesh, and how much room it has."""

import random
from typing import NamedTuple


class Speeds(NamedTuple):
    """All `_s` are seconds. The prefill pool has `num_prefill_pages`, the other one `num_pages`.

    A copy takes `copy_s` for each quantum, and up to `most_late` of them after a cancel.
    """

    num_pages: int
    num_prefill_pages: int
    copy_s: float
    most_late: int
    step_ms: dict[str, int]
    restart_s: tuple[float, float]
    prefill_restart_s: tuple[float, float]


def draw_speeds(draw: random.Random, theme: str, groups: list[str]) -> Speeds:
    """From room for everybody to less than one request may need; steps and copies from faster than the network's faults
    to slower than a restart; restarts from before anybody has noticed the death to after everybody has.
    """
    num_pages = draw.choice([21, 33, 48, 96])
    num_prefill_pages = 0
    copy_s = draw.choice([0.0005, 0.005, 0.05])
    most_late = 12
    restart_s = draw.choice([(0.001, 0.02), (0.02, 1.0), (0.5, 6.0)])
    prefill_restart_s = restart_s
    steps = [2, 2, 30, 100 if num_pages > 48 else 30]
    if theme == "steps":
        num_pages, steps = draw.choice([33, 48, 96]), [2, 30, 100]
        restart_s = prefill_restart_s = (0.001, 0.02)
    elif theme == "copies":
        num_pages, steps, copy_s = draw.choice([21, 33]), [2, 10], draw.choice([0.01, 0.05])
        most_late = 60
        # While the prefill scheduler is away for longer, decode's steps take the pages that copies were cut off from.
        restart_s, prefill_restart_s = (0.001, 0.02), draw.choice([(0.001, 0.02), (0.5, 3.0), (0.5, 3.0)])
    elif theme == "sources":
        # Decode has room for many transfers at once, and prefill needs the pages of earlier ones for the next.
        num_pages, num_prefill_pages, steps, copy_s = 96, 21, [2], 0.05
        restart_s = prefill_restart_s = (0.001, 0.02)
    elif theme == "leavers":
        num_pages, steps = 96, [100]
    elif theme == "silence":
        # A request for more than prefill has room for waits until decode is back.
        num_prefill_pages = 16
        restart_s = prefill_restart_s = (0.001, 0.02)
    elif theme == "stalls":
        num_pages, steps, copy_s = draw.choice([33, 48, 96]), [2, 10], draw.choice([0.0005, 0.005])
        restart_s = prefill_restart_s = (0.001, 0.02)
    # Prefill and decode need not run on the same hardware.
    step_ms = {group: draw.choice(steps) for group in groups}
    return Speeds(num_pages, num_prefill_pages or num_pages, copy_s, most_late, step_ms, restart_s, prefill_restart_s)
