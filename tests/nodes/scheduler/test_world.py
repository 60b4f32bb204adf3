"""Whole requests through the cores, undisturbed: the driver itself, and each way that a request can take."""

from tests.nodes.scheduler.scheduler_world import World


def prompt(length: int, first: int = 5) -> list[int]:
    return [2 + (first * 31 + index * 7) % 900 for index in range(length)]


def test_prefill_elsewhere() -> None:
    world = World(num_pages={"d": 64, "p": 64})
    request = world.submit(prompt(39), "d", prefill="p")
    world.settle()
    assert request.finish
    assert (world.cores["d"].grants.num_done, world.cores["p"].orders.num_done) == (1, 1)
    assert world.workers["w-p"].num_rows == 5, "chunks of 8 tokens"


def test_many_at_once_share_their_prefix() -> None:
    world = World(num_pages={"m": 256})
    shared = prompt(33)
    requests = [world.submit([*shared, 100 + index], "m", max_tokens=12) for index in range(12)]
    world.settle()
    assert requests[0].num_cached_tokens == 0
    assert all(request.num_cached_tokens == 32 for request in requests[1:])
