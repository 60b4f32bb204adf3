"""Clients that send one request after the other and, if their connection breaks, the same one again."""

import asyncio
import itertools
import time
from collections import Counter

from tests.chaos.streams import ANSWER_TIMEOUT_S, Answer, asking, differences, stream

REDIAL_S = 0.05
NUM_BODIES = 32
NUM_SALTS = 64


class ReconnectingClients:
    """`num_clients` of them, until they are told to stop; `expected` has the right answer to each of the bodies.

    `lost` has every answer that broke without a gateway's death to excuse it, `different` every one not as expected.
    """

    def __init__(self, port: int, expected: list[Answer], num_clients: int) -> None:
        self.num_answered = 0
        self.num_cut = 0
        self.lost: list[str] = []
        self.different: list[str] = []
        self.event_times_s: list[float] = []
        self.gateway_deaths_s: list[float] = []
        self._port = port
        self._expected = expected
        self._bodies = [asking(f"storm {salt}", NUM_BODIES) for salt in range(NUM_SALTS)]
        self._numbers = itertools.count()
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def stop(self) -> None:
        """Let every client get the answer that it waits for."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    def gaps_s(self, since_s: float, until_s: float) -> list[float]:
        """The gaps from one event, of any client, to the next, the longest first."""
        times_s = [since_s, *(at for at in self.event_times_s if since_s <= at <= until_s), until_s]
        return sorted((after - before for before, after in itertools.pairwise(times_s)), reverse=True)

    def events_each_second(self, since_s: float) -> Counter[int]:
        """How many events arrived in each second since then."""
        return Counter(int(at - since_s) for at in self.event_times_s if at >= since_s)

    async def _client(self) -> None:
        while not self._is_stopping:
            number = next(self._numbers)
            while not await self._ask(number):
                await asyncio.sleep(REDIAL_S)

    async def _ask(self, number: int) -> bool:
        """Whether it was answered, well or not."""
        index = number % NUM_BODIES
        answer = Answer()
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await stream(self._port, self._bodies[number // NUM_BODIES % NUM_SALTS][index], answer, self._count)
        except TimeoutError:
            answer.broken = f"not ended within {ANSWER_TIMEOUT_S:.0f} s"
        except OSError as error:
            if not answer.is_open or any(began_s <= at for at in self.gateway_deaths_s):
                self.num_cut += answer.is_open
                return False
            answer.broken = f"{error!r}"
        self.num_answered += 1
        if answer.broken:
            self.lost.append(f"after {time.monotonic() - began_s:.1f} s: {answer.broken}")
        else:
            self.different += differences([answer], [self._expected[index]])
        return True

    def _count(self) -> None:
        self.event_times_s.append(time.monotonic())
