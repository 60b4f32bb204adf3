"""The suites that run by seeds: each one's scenario, the bugs planted for it, and how many seeds run without one."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from tests.simulation import (
    disks,
    drains,
    ends,
    hosts,
    keys,
    leases,
    moves,
    plans,
    prompts,
    releases,
    returns,
    scenario,
    strangers,
    tables,
    vectors,
)
from tests.simulation.ask_mutations import ASKING
from tests.simulation.disk_mutations import DISKS
from tests.simulation.host_mutations import DRAINS, HOSTS, KEYS, LEASES, RELEASES, RETURNS, STRANGERS
from tests.simulation.move_mutations import MOVES
from tests.simulation.mutations import PROMPTS, SCENARIO, TABLES
from tests.simulation.planting import Bug


class Suite(NamedTuple):
    """`num_seeds` must pass in CI, `num_slow` in `make test-all`; `least`: how often things must occur in the former.

    If `num_seeds` is 0, `test_whole_mesh.py` runs the seeds. A bug is seen by one of the `num_nearby` seeds from its
    own on: a change to the simulated world changes what a seed shows, but one of the next most often shows it too.
    """

    run_seed: Callable[[int], Counter[str]]
    planted: dict[str, Bug]
    num_nearby: int
    num_seeds: int = 0
    least: dict[str, int] = {}
    num_slow: int = 0


_DIED = ["died: worker", "died: scheduler", "dropped", "duplicated", "sleeps"]

SUITES = {
    "scenario": Suite(scenario.run_seed, SCENARIO | ASKING, 30),
    "hosts": Suite(hosts.run_seed, HOSTS, 50),
    "keys": Suite(keys.run_seed, KEYS, 30, 3, {"list": 5, "joined": 1}, 125),
    "releases": Suite(releases.run_seed, RELEASES, 18, 3, dict.fromkeys(_DIED, 1), 1500),
    "drains": Suite(drains.run_seed, DRAINS, 24, 7, dict.fromkeys(["drained", "told", "renewed"], 1), 100),
    "ends": Suite(ends.run_seed, ends.ENDS, 20, 4, {"awaits others": 2, "under way": 10, "whole": 20, "told": 5}, 300),
    "returns": Suite(returns.run_seed, RETURNS, 20, 5, dict.fromkeys(["remade", "behind", "refused"], 2), 100),
    # Hearsay without a proof is not reported: for actors that were started by hand there is none.
    "strangers": Suite(
        strangers.run_seed, STRANGERS, 10, 4,
        {attack.__name__: 1 for attack in strangers.ATTACKS} | {"refused": 30},
    ),
    "prompts": Suite(prompts.run_seed, PROMPTS, 20, 4, {"died: worker": 1, "died: scheduler": 1, "dropped": 1}, 100),
    "vectors": Suite(
        vectors.run_seed, vectors.VECTORS, 20, 4, {"died: worker": 1, "died: scheduler": 1, "dropped": 1}, 1000
    ),
    "disks": Suite(
        disks.run_seed, DISKS, 20, 5,
        {"pages stored": 60, "pages restored": 40, "restores failed": 1, "died in a restore": 2, "died: kv": 1}, 500,
    ),
    "plans": Suite(
        plans.run_seed, plans.PLANS, 20, 6, {"plans": 50, "steps in plans": 300, "died: worker": 1, "dropped": 1}, 500
    ),
    "moves": Suite(moves.run_seed, MOVES, 30, 9, {"moved": 20, "killed": 6, "both": 2, "unequal": 1}, 1000),
    "leases": Suite(leases.run_seed, LEASES, 20, 4, {"hung: supervisor": 2, "died: registry": 2, "dropped": 40}, 500),
    "tables": Suite(tables.run_seed, TABLES, 40, 4, {"scheduler": 4}, 100),
}  # fmt: skip
