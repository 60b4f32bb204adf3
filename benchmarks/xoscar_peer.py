"""Calls between two actors of xoscar, for `benchmarks/mesh_calls.py`.

Run by an interpreter that has xoscar, which need not have this project: nothing of it is imported here. Prints two
numbers: microseconds of a round trip, and one-way messages a second.
"""

import asyncio
import pickle
import statistics
import time

import xoscar

NUM_TRIPS = 4_000
NUM_WARM = 500
NUM_FRAMES = 10_000
"""A quarter of what the others send, since it takes ten times as long for each."""
TEXT = "x" * 64


FRAME = ([*range(32)], [*range(1000, 1032)], [1] * 32, [*range(5000, 5032)])
"""A step's tokens of 32 requests: the columns of `nodes.protocol.TokenBatch`."""


class Far(xoscar.StatelessActor):
    """Echoes, and counts what comes one way."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = 0.0

    async def echo(self, text: str) -> str:
        """The same text."""
        return text

    async def take(self, pickled: bytes) -> None:
        """Count it."""
        pickle.loads(pickled)  # noqa: S301 - what the other actor has just pickled
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.count += 1

    async def taken(self) -> tuple[int, float]:
        """How many came, and the seconds from the first to the last."""
        return self.count, self.last - self.first


class Near(xoscar.StatelessActor):
    """Calls the other one, from a process of its own, as one actor calls another."""

    async def run(self, address: str) -> tuple[float, float]:
        """Microseconds of a round trip, median; messages a second, as received."""
        far = await xoscar.create_actor(Far, address=address)
        trips: list[float] = []
        for _ in range(NUM_WARM + NUM_TRIPS):
            began = time.perf_counter()
            await far.echo(TEXT)
            trips.append(time.perf_counter() - began)
        for _ in range(NUM_FRAMES):
            # Given the lists, xoscar serializes number by number and does a fifth of these messages a second.
            await far.take.tell(pickle.dumps(FRAME))
        while (await far.taken())[0] < NUM_FRAMES:  # noqa: ASYNC110 - it has no event for this
            await asyncio.sleep(0.01)
        count, elapsed_s = await far.taken()
        return statistics.median(trips[NUM_WARM:]) * 1e6, (count - 1) / elapsed_s


async def main() -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=2)
    async with pool:
        here, there = list(pool.sub_processes)
        near = await xoscar.create_actor(Near, address=here)
        print(*await near.run(there), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
