"""Whole meshes on devices, of silicon or of software: started with patience, since kernels may have to be compiled."""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.chaos.chaos_mesh import UNRATIONED, ChaosMesh, Incarnations, started
from tests.chaos.streams import Answer, Wave, bodies, differences
from tests.software_device.device import bytes_in_use

# FlashInfer has kernels for heads of 64; deterministic, so that company does not show in the bits.
MODEL = ("--model", "random:tiny-qwen3", "--served-name", "tiny", "--deterministic")
APART = ("--prefill", "1", "--decode", "1", "--local-prefill-max", "0")
MIXED = ("--mixed", "1")
START_S = float(os.environ.get("GPU_CHECK_READY_S", "420"))
NUM_REQUESTS = 8
NUM_TOKENS = 40
COPY_TABLES = 1 << 20
"""At most what a kv_agent that has copied scattered pages keeps for that on a device."""


@contextlib.contextmanager
def mesh_on(
    device: str,
    *options: str,
    dtype: str = "bfloat16",
    kv_memory: str = "128MiB",
    environment: Mapping[str, str] | None = None,
) -> Iterator[ChaosMesh]:
    """A settled mesh. `environment`: what all its processes have besides."""
    options = (
        *MODEL,
        "--dtype",
        dtype,
        "--kv-memory",
        kv_memory,
        "--mem-fraction",
        "0.5",
        "--device",
        device,
        *options,
    )
    with started(*options, start_s=START_S, **UNRATIONED, **(environment or {})) as mesh:
        yield mesh


def answers_of(mesh: ChaosMesh, salt: str, **wave: Any) -> list[Answer]:
    """What a wave of greedy and sampled requests is answered with."""
    answers = asyncio.run(Wave(mesh.port, bodies(salt, NUM_REQUESTS, NUM_TOKENS), num_clients=6, **wave).run())
    assert not [answer.broken for answer in answers if answer.broken]
    return answers


def undisturbed_answers(mesh: ChaosMesh) -> list[Answer]:
    """Those of a mesh whose pages do move, to compare others with."""
    answers = answers_of(mesh, "undisturbed")
    assert len({answer.text for answer in answers}) > len(answers) // 2, "texts that are all alike prove nothing"
    assert pages_moved(mesh) > len(answers), "pages did move"
    return answers


def answers_when_struck(mesh: ChaosMesh, undisturbed: list[Answer], actor_id: str) -> list[Answer]:
    """The same wave, with an actor killed when a third of what was answered then has come."""
    at = sum(answer.num_events for answer in undisturbed) // 3
    return answers_of(mesh, f"{actor_id} dies", at=at, blow=lambda: mesh.strike(actor_id))


def dies_unseen(
    mesh: ChaosMesh, undisturbed: list[Answer], memory: Path, actor_id: str
) -> tuple[Incarnations, Incarnations]:
    """Kill an actor under the wave: no text shows it, and no pool too many is in use. The mesh before and after.

    `undisturbed` is what is answered without that.
    """
    before, in_use = mesh.settled(), bytes_in_use(memory)
    answers = answers_when_struck(mesh, undisturbed, actor_id)
    after = mesh.settled(90.0)
    assert not differences(answers, undisturbed)
    assert abs(bytes_in_use(memory) - in_use) <= COPY_TABLES
    return before, after


def pages_moved(mesh: ChaosMesh) -> float:
    return sum(value for name, value in mesh.metrics().items() if name.startswith("mesh_kv_transfer_pages_total"))
