"""A worker that answers nonsense in a whole mesh: clients get their text, and the worker is replaced."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import structlog

from mesh.simulation.faults import Faults
from mesh.simulation.virtual_time import run
from nodes.protocol import StepResult
from nodes.worker.core import SendResult
from tests.simulation.hardware import SlowWorker
from tests.simulation.scenario import LIMIT_S, SILENT
from tests.simulation.whole_mesh import SimulatedMesh

VOCAB = 259
TEXTS = [f"{number}: all of us begin with other words, and end with these" for number in range(6)]

Lie = Callable[[StepResult], list[Any]]


def altered(result: StepResult, **fields: object) -> StepResult:
    return msgspec.structs.replace(result, **fields)


LIES: dict[str, Lie] = {
    "too many tokens": lambda one: [altered(one, token_ids=[*one.token_ids, 7])],
    "no tokens": lambda one: [altered(one, token_ids=[])],
    "tokens beyond the vocabulary": lambda one: [altered(one, token_ids=[VOCAB for _ in one.token_ids])],
    "tokens that no array holds": lambda one: [altered(one, token_ids=[2**50 for _ in one.token_ids])],
    "what cannot be decoded": lambda one: [altered(one, token_ids=[float("nan") for _ in one.token_ids])],
    "nothing": lambda one: [],
    "only what was not asked": lambda one: [altered(one, step=one.step + 1000), altered(one, scheduler_epoch=99)],
    "everything twice": lambda one: [one, one],
    "everything late as well": lambda one: [altered(one, step=one.step - 1), one],
}
BELIEVED = {"everything twice", "everything late as well"}


class Backwards:
    """Holds each result back until the next one, which it sends first; or until it is asked again."""

    def __init__(self) -> None:
        self.held: StepResult | None = None

    def __call__(self, result: StepResult) -> list[StepResult]:
        held, self.held = self.held, None
        if held is None:
            self.held = result
            return []
        return [result, held]


class LyingWorker(SlowWorker):
    """Lies in its first incarnation."""

    lie: Lie

    def _perform(self, command: Any) -> None:
        if isinstance(command, SendResult) and self.ctx.address.epoch == 1:
            for result in self.lie(command.result):
                super()._perform(command._replace(result=result))
        else:
            super()._perform(command)


class LyingMesh(SimulatedMesh):
    """Its decode worker (or the only one) lies."""

    lie: Lie
    figures: dict[str, float]

    def _worker(self, config: Any) -> SlowWorker:
        # The liar is to be replaced for lying alone.
        self.devices.end()
        if config.group.startswith("prefill"):
            return super()._worker(config)
        worker = LyingWorker(config, self.host)
        worker.errors, worker.moments, worker.lie = self.errors, self.moments, self.lie
        worker.devices = self.devices
        return worker


async def texts_of(mesh: LyingMesh) -> list[tuple[str, Any]]:
    await mesh.start()
    try:
        bodies = [json.dumps({"model": "echo", "prompt": text, "max_tokens": 100}).encode() for text in TEXTS]
        answers = [mesh.request(body, f"cmpl-{number}") for number, body in enumerate(bodies)]
        outcomes = await asyncio.gather(*answers)
        await mesh.settle()
        mesh.figures = mesh.actors[f"scheduler-{mesh.groups[-1]}"].stats()
        await mesh.stop()
    finally:
        mesh.bury()
    return [(one.text, one.failure) for of_client in outcomes for one in of_client]


class Group(NamedTuple):
    """What became of the group with the liar, whose scheduler went on."""

    worker_epoch: int
    figures: dict[str, float]


def answered(lie: Lie, mixed: bool) -> Group:
    """Have all texts answered by a mesh whose worker tells this lie."""
    structlog.configure(wrapper_class=SILENT)
    mesh = LyingMesh(11, Faults(), mixed)
    mesh.lie = lie
    mesh.num_pages = 96
    assert run(texts_of(mesh), limit_s=LIMIT_S) == [(text, None) for text in TEXTS]
    group = mesh.groups[-1]
    assert mesh.systems[f"scheduler-{group}"].address.epoch == 1
    return Group(mesh.systems[f"worker-{group}"].address.epoch, mesh.figures)


# A mixed group's worker is asked the same and more.
@pytest.mark.parametrize(
    "mixed", [pytest.param(False, id="prefill and decode", marks=pytest.mark.slow), pytest.param(True, id="mixed")]
)
@pytest.mark.parametrize("name", LIES)
def test_a_lying_worker_is_replaced_and_no_client_sees_it(name: str, mixed: bool) -> None:
    group = answered(LIES[name], mixed)
    assert group.worker_epoch == (1 if name in BELIEVED else 2)


def test_a_worker_that_answers_out_of_order_is_understood() -> None:
    group = answered(Backwards(), mixed=True)
    assert group.worker_epoch == 1
    assert group.figures['mesh_scheduler_results_refused_total{reason="early"}'] > 0
