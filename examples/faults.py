"""A custom actor tested under seeded faults, in one process and on virtual time.

    python examples/faults.py [SEED]

`words.Words` answers over a network that loses, repeats, delays and cuts off messages, and is killed on the way. Half a
minute of the mesh takes a fraction of a second, and a seed gives the same run each time: a failure can be replayed.
"""

import asyncio
import sys
from collections import Counter

from words import CountWords, Words

from mesh.errors import CallError
from mesh.runtime.telemetry import setup_log
from mesh.simulation.faults import Faults
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import run
from mesh.testing.actors import Actors
from nodes.registry.actor import RegistryActor

FAULTS = Faults(drop=0.02, duplicate=0.05, slow=0.1, reset=0.002, partition=0.1)


async def storm(seed: int) -> tuple[Counter[str], int]:
    """Ask a hundred times, with a kill in the middle. Returns how often each outcome came, and a digest of the run."""
    actors = Actors(SimulatedNetwork(seed, FAULTS))
    await actors.start("registry", RegistryActor())
    await actors.start("words", Words(), waits=False)
    asker = (await actors.start("asker", Words(), waits=False)).actor
    outcomes: Counter[str] = Counter()
    for number in range(100):
        if number == 50:
            await actors.kill("words")
            await actors.start("words", Words(), waits=False)
        try:
            answer = await asker.ctx.ask("words", CountWords(text="a b c"), timeout_s=2.0)
            # Whatever was lost or repeated: an answer that comes is the right one, and an ask ends by its deadline.
            assert answer.message.num_words == 3
            outcomes["ok"] += 1
        except CallError as error:
            outcomes[error.code] += 1
        await asyncio.sleep(0.3)
    actors.network.calm()
    await actors.stop()
    return outcomes, actors.network.trace.fingerprint


if __name__ == "__main__":
    setup_log(level="error", stream=sys.stderr)  # what the faults do to links is no news here
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    found, digest = run(storm(seed))
    print(f"seed {seed}: {dict(found)}, run {digest:08x}")
