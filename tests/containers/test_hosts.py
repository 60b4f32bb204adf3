"""A mesh over three hosts whose hosts die, stand still or are cut off under streams: nobody can tell from the texts."""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.containers.mesh import DECODE, HEAD, HOSTS, PREFILL, TOPOLOGY, HostMesh
from benchmarks.containers.world import World, may_cut_packets, wait_until
from cli.chaos.held import held
from nodes.tokenizer.routing.core import LOST_S
from tests.chaos.streams import NUM_CLIENTS, Answer, Wave, bodies, differences

pytestmark = [pytest.mark.containers, pytest.mark.chaos, pytest.mark.timeout(600)]

PAUSE_S = 10.0
CUT_S = 15.0
SLACK_S = 5.0


@pytest.fixture(scope="module")
def undisturbed(image: str) -> list[Answer]:
    """What one host with one mesh in it answers."""
    world = World(image)
    try:
        one = world.container("one", options=("--publish", "127.0.0.1::8000"))
        wait_until(lambda: one.meshctl("probe", "generate", check=False).returncode == 0, "it serves", 120.0)
        answers = asyncio.run(Wave(one.port(), bodies("undisturbed")).run())
    finally:
        world.remove()
    assert not [answer.broken for answer in answers if answer.broken]
    assert len({answer.text for answer in answers}) > len(answers) // 2, "texts that are all alike prove nothing"
    return answers


@pytest.fixture(scope="module")
def mesh(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostMesh]:
    world = World(image)
    try:
        yield HostMesh.settled_in(world)
    finally:
        world.keep_logs(Path(tmp_path_factory.mktemp("logs")))
        world.remove()


def test_texts_are_those_of_one_host_and_pages_come_by_tcp(mesh: HostMesh, undisturbed: list[Answer]) -> None:
    before = mesh.pulled_bytes("tcp")
    answers = asyncio.run(Wave(mesh.port, bodies("three hosts")).run())
    assert not differences(answers, undisturbed)
    assert mesh.pulled_bytes("tcp") > before
    assert " by tcp" in mesh[HEAD].meshctl("ps").stdout
    assert mesh.pulled_bytes("shm") == 0.0, "no two groups share a host"
    for host in HOSTS:
        for question in ("live", "ready", "generate"):
            assert mesh[host].meshctl("probe", question).stdout.startswith(question)


def paused(mesh: HostMesh, host: str) -> None:
    with mesh[host].paused():
        time.sleep(PAUSE_S)


def cut_off(mesh: HostMesh, host: str, *others: str) -> None:
    with mesh[host].cut_off(*(mesh[other] for other in others)):
        time.sleep(CUT_S)


def disconnected(mesh: HostMesh, host: str) -> None:
    with mesh[host].disconnected():
        time.sleep(CUT_S)


Blow = Callable[[HostMesh], None]
BLOWS: dict[str, tuple[Blow, Callable[[str], bool]]] = {
    # What is done, and who has another epoch afterwards: who was killed, and nobody else.
    "registry killed": (HostMesh.kill_registry, lambda actor: actor == "registry"),
    "decode made again": (lambda mesh: mesh.remake(DECODE), lambda actor: actor.endswith(".decode")),
    "prefill made again": (lambda mesh: mesh.remake(PREFILL), lambda actor: actor.endswith(".prefill")),
    "decode paused": (lambda mesh: paused(mesh, DECODE), lambda _: False),
    "prefill paused": (lambda mesh: paused(mesh, PREFILL), lambda _: False),
    "head paused": (lambda mesh: paused(mesh, HEAD), lambda _: False),
    "decode cut off": (lambda mesh: cut_off(mesh, DECODE), lambda _: False),
    "prefill cut off": (lambda mesh: cut_off(mesh, PREFILL), lambda _: False),
    "prefill and decode cut apart": (lambda mesh: cut_off(mesh, DECODE, PREFILL), lambda _: False),
    "decode disconnected": (lambda mesh: disconnected(mesh, DECODE), lambda _: False),
    "prefill disconnected": (lambda mesh: disconnected(mesh, PREFILL), lambda _: False),
}


@pytest.mark.skipif(not may_cut_packets(), reason="packets of a container are dropped by root only")
@pytest.mark.parametrize("name", BLOWS)
def test_struck_under_streams(mesh: HostMesh, undisturbed: list[Answer], name: str) -> None:
    strike, is_renewed = BLOWS[name]
    before = mesh.settled()

    async def wave_and_blow() -> tuple[Wave, list[Answer]]:
        struck: list[asyncio.Task[None]] = []
        blow = lambda: struck.append(asyncio.create_task(asyncio.to_thread(strike, mesh)))  # noqa: E731
        at = sum(answer.num_events for answer in undisturbed) // 3
        wave = Wave(mesh.port, bodies(name), at=at, blow=blow)
        answers = await wave.run()
        await struck[0]
        return wave, answers

    wave, answers = asyncio.run(wave_and_blow())
    assert not differences(answers, undisturbed)
    assert wave.num_hit >= NUM_CLIENTS // 4, "too few streams ran when the blow fell"
    renewed = {actor for actor in before if is_renewed(actor)}
    wait_until(lambda: all(mesh.settled()[actor] > before[actor] for actor in renewed), "who was killed is back")
    after = mesh.settled()
    assert {actor for actor in before | after if before.get(actor) != after.get(actor)} == renewed
    wait_until(lambda: not held(mesh.metrics()), f"nothing is held: {held(mesh.metrics())}")

    # Healed: both hosts have their part again. A scheduler whose link was lost is the last choice until it is heard.
    pulled, number = mesh.pulled_bytes("tcp"), itertools.count()

    def is_pulled_again() -> bool:
        answers = asyncio.run(Wave(mesh.port, bodies(f"after {name} {next(number)}")).run())
        assert not differences(answers, undisturbed)
        return mesh.pulled_bytes("tcp") > pulled

    wait_until(is_pulled_again, "pages go from host to host again", LOST_S + SLACK_S)
    wait_until(lambda: not held(mesh.metrics()), "nothing is held", 30.0)


def test_a_decode_host_joins_by_its_token_and_is_drained_away(mesh: HostMesh, undisturbed: list[Answer]) -> None:
    before = mesh.settled()
    head, keys = mesh[HEAD], ("--keys", "/keys/head", "--name", "default")
    token = head.meshctl("keys", "token", *keys, "--file", TOPOLOGY).stdout.split()[0]
    mount = f"{mesh.world.volume('keys-joined')}:/keys/decode"
    command = ("up", "--join", token, "--decode", "1", "--host", "joined", "--keys", "/keys/decode")
    joined = mesh.world.container("joined", *command, options=("--volume", mount))
    added = wait_until(lambda: re.search(r"keys add joined '(\S+)'", joined.logs()), "it says what its key is")
    wait_until(lambda: joined.inspect("{{.State.Running}}") == "false", "unknown it does not begin")
    head.meshctl("keys", "add", "joined", added[1], *keys)
    joined.kill()
    joined.start()
    wait_until(lambda: "worker-decode-0.joined" in mesh.settled(), "it is one of the hosts", 120.0)

    async def wave_and_end() -> list[Answer]:
        ended: list[asyncio.Task[object]] = []
        away = lambda: ended.append(  # noqa: E731
            asyncio.create_task(asyncio.to_thread(head.meshctl, "down", "--host", "joined"))
        )
        wave = Wave(mesh.port, bodies("joined"), at=sum(answer.num_events for answer in undisturbed) // 3, blow=away)
        answers = await wave.run()
        await ended[0]
        return answers

    assert not differences(asyncio.run(wave_and_end()), undisturbed)
    wait_until(lambda: joined.inspect("{{.State.Running}}") == "false", "it has ended", 90.0)
    assert joined.inspect("{{.State.ExitCode}}") == "0"
    wait_until(lambda: mesh.settled() == before, "nobody else was touched")
    wait_until(lambda: not held(mesh.metrics()), "nothing is held", 30.0)
