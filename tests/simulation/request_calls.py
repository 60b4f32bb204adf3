"""Python calls that a request, and a token, cost each role: `python -m tests.simulation.request_calls [ROLE]`.

A mesh without faults serves requests of two tokens and of `MANY`, on virtual time, and what is called meanwhile is
counted by the process that calls it. Counts are the same on any machine, busy or not, where times of a mesh of ten
processes wobble by a third; a call is about half a microsecond of a core. HTTP is not part of it, the gateway's service
is. The simulation's worker splits steps, which overstates that role. With a role, its functions, most calls first.
"""

import asyncio
import json
import sys
from collections import Counter
from types import CodeType, FrameType
from typing import Any, NamedTuple

import msgspec

from mesh.simulation import virtual_time
from mesh.simulation.faults import Faults
from mesh.testing.processes import RUNNING_PROCESS
from nodes.kv_agent.config import KVAgentConfig
from nodes.scheduler.config import SchedulerConfig
from tests.simulation.speeds import Speeds
from tests.simulation.whole_mesh import SimulatedMesh

CLIENTS = 16
REQUESTS = 64
MANY = 34
PROMPT_CHARS = 112
"""As many tokens of `echo`, seven full pages: as in `benchmarks/ring.py`."""
NUM_PAGES = 320
"""Twice what they hold at once, and little enough that the warm-up uses each page: a page's first use costs more."""
_WARM_UP = 48
_LEFT_OUT = ("/mesh/simulation/", "/mesh/testing/", "/tests/simulation/", "/asyncio/")
"""What stands for the network, processes and the loop, which are uvloop's and the kernel's elsewhere."""
_SHOWN = 40


class UndisturbedMesh(SimulatedMesh):
    """No faults, room for everybody, and the limits of a real mesh."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.speeds = Speeds(NUM_PAGES, NUM_PAGES, 0.0, 1, dict.fromkeys(self.groups, 2), (1.0, 1.0), (1.0, 1.0))
        self.depths = dict.fromkeys(self.groups, 2)

    def _agent_config(self, groups: list[str]) -> KVAgentConfig:
        quantum_bytes = KVAgentConfig(pools=[]).quantum_bytes
        return msgspec.structs.replace(super()._agent_config(groups), quantum_bytes=quantum_bytes)

    def _scheduler(self, group: str, spec: Any) -> SchedulerConfig:
        config = super()._scheduler(group, spec)
        return msgspec.structs.replace(config, max_running=256, chunk_tokens=512, step_tokens=2048, plan_horizon_s=0.01)


class Counts(NamedTuple):
    """Python calls by the actor in whose process they were made, and the function."""

    by_function: Counter[tuple[str, CodeType]]
    num_requests: int

    def by_role(self) -> dict[str, float]:
        """Calls for a request. Of actors of a role with a phase, each phase by itself."""
        found: Counter[str] = Counter()
        for (actor_id, _), number in self.by_function.items():
            found[role_of(actor_id)] += number
        return {role: number / self.num_requests for role, number in sorted(found.items())}


def role_of(actor_id: str) -> str:
    """`scheduler-decode-0` is a `scheduler-decode`, `detokenizer-1` a `detokenizer`."""
    return actor_id.rstrip("0123456789").rstrip("-")


def count_calls(num_tokens: int, num_requests: int = REQUESTS, clients: int = CLIENTS) -> Counts:
    """Serve that many requests of `num_tokens` output tokens each, by so many clients at once, after a warm-up."""
    calls: Counter[tuple[str, CodeType]] = Counter()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or any(part in frame.f_code.co_filename for part in _LEFT_OUT):
            return
        if (process := RUNNING_PROCESS.get()) is not None:
            calls[process.name, frame.f_code] += 1

    async def main() -> None:
        mesh = UndisturbedMesh(1, Faults())
        await mesh.start()
        await _serve(mesh, 0, _WARM_UP, clients, num_tokens)
        sys.setprofile(called)
        try:
            await _serve(mesh, _WARM_UP, _WARM_UP + num_requests, clients, num_tokens)
        finally:
            sys.setprofile(None)

    virtual_time.run(main())
    return Counts(calls, num_requests)


async def _serve(mesh: SimulatedMesh, first: int, end: int, clients: int, num_tokens: int) -> None:
    numbers = iter(range(first, end))

    async def client() -> None:
        for number in numbers:
            prompt = f"{number:06d} ".ljust(PROMPT_CHARS, "x")
            body = {"model": "echo", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            (outcome,) = await mesh.request(json.dumps(body).encode(), f"cmpl-{number}")
            assert outcome.finish_reason == "length", outcome

    await asyncio.gather(*(client() for _ in range(clients)))


def main() -> None:
    two, many = count_calls(2), count_calls(MANY)
    print("Python calls          request of 2 tokens   token more")
    for role, number in two.by_role().items():
        more = (many.by_role()[role] - number) / (MANY - 2)
        print(f"{role:22s}{number:19.0f}{more:13.1f}")
    for wanted in sys.argv[1:]:
        its = {code: number for (actor, code), number in two.by_function.items() if role_of(actor) == wanted}
        for code, number in sorted(its.items(), key=lambda item: -item[1])[:_SHOWN]:
            print(f"{number / two.num_requests:8.2f}  {code.co_qualname}  {code.co_filename}:{code.co_firstlineno}")


if __name__ == "__main__":
    main()
