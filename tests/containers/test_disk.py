"""A mesh over three hosts with pages on volumes: a host that is made again with its volume has its prefixes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.containers.mesh import DECODE, HEAD, PREFILL, HostMesh
from benchmarks.containers.world import World, wait_until
from tests.chaos.streams import Answer, Wave, bodies, differences

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

NUM_PROMPTS = 12


@pytest.fixture
def mesh(image: str, tmp_path: Path) -> Iterator[HostMesh]:
    world = World(image)
    settings = ("--env", "KVMESH_KV__DISK__DIRECTORY=/pages", "--env", "KVMESH_KV__DISK__SIZE=64MiB")
    try:
        pools = (PREFILL, DECODE)
        volumes = {host: ("--volume", f"{world.volume(f'pages-{host}')}:/pages", *settings) for host in pools}
        yield HostMesh.settled_in(world, volumes)
    finally:
        world.keep_logs(tmp_path)
        world.remove()


def ask(mesh: HostMesh) -> list[Answer]:
    answers = asyncio.run(Wave(mesh.port, bodies("one salt", NUM_PROMPTS, max_tokens=24), num_clients=2).run())
    assert not [answer.broken for answer in answers if answer.broken]
    return answers


def test_a_host_that_is_made_again_with_its_volume_has_its_prefixes(mesh: HostMesh) -> None:
    agent, scheduler = 'actor="kv-agent-0.decode"', 'actor="scheduler-decode-0.decode"'
    before = mesh.settled()
    first = ask(mesh)
    assert mesh.total("mesh_scheduler_restored_pages_total", scheduler) == 0.0, "all was new"
    wait_until(lambda: mesh.total("mesh_kv_disk_pages", agent) >= NUM_PROMPTS * 6, "the prompts are stored")
    wait_until(lambda: mesh.total("mesh_kv_disk_queued_pages", agent) == 0.0, "nothing waits to be written")
    stored, pulled = mesh.total("mesh_kv_disk_pages", agent), mesh.pulled_bytes("tcp")

    mesh.remake(DECODE)
    renewed = {actor for actor in before if actor.endswith(f".{DECODE}")}
    wait_until(lambda: all(mesh.settled()[actor] > before[actor] for actor in renewed), "the host is back")
    assert mesh.total("mesh_scheduler_restored_pages_total", scheduler) == 0.0
    again = ask(mesh)
    assert not differences(again, first)
    # An answer of the agent that takes longer than 5 ms is not waited for, so on a busy machine some are computed.
    assert mesh.total("mesh_scheduler_restored_pages_total", scheduler) >= NUM_PROMPTS / 2 * 6
    assert mesh.total("mesh_kv_disk_pages", agent) >= stored, "what was there stays there"
    assert mesh.total("mesh_kv_pulled_bytes_total", agent, 'transport="disk"') > 0.0
    # What was restored did not come from the other host, which had it in its pool all the time. (A new agent's count.)
    assert mesh.pulled_bytes("tcp") < pulled / 2
    ls = mesh[HEAD].meshctl("kv", "ls").stdout
    assert "kv-agent-0.decode" in ls
    assert f"kv-agent-0.{PREFILL}" in ls
