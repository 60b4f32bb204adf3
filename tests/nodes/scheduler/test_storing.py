"""Which pages a scheduler tells its agent to keep on disk: each that is full, or used again, and none of other bits."""

from typing import Any

import msgspec
import pytest

from kvstore.hashing import chain_hashes, page_hash, root_hash
from kvstore.protocol import CacheCleared, ListStoredPages, PagesOnDisk, StoreChanged, StorePages
from mesh.address import Address
from mesh.runtime.effects import Told
from nodes.protocol import Adopted
from nodes.scheduler.cache_news import GATHER_S, RESTATE_PAUSE_S
from nodes.scheduler.events import FollowerReset, MembersChanged
from nodes.scheduler.storing import PagesToStore
from nodes.tokenizer.routing.cache_index import CacheIndex
from tests.nodes.scheduler.scheduler_world import PAGE, Worker, World, prompt
from tests.simulation.planting import around, nothing


class Taught(World):
    """Notes what agents are told to keep, with what the pages hold at that moment."""

    def __init__(self, **settings: Any) -> None:
        self.kept: list[tuple[str, StorePages]] = []
        super().__init__(**settings)

    def put(self, sender: str, receiver: str, message: Any, **more: Any) -> None:
        if isinstance(message, StorePages):
            memory, cache = self.memories[message.group], self.cores[sender].books.cache
            columns = zip(message.pages, message.generations, message.hashes, message.parents, strict=True)
            for page, generation, own, parent in columns:
                packed = b"".join(token.to_bytes(4, "little") for token in memory[page])
                assert own == page_hash(parent, packed), "the page does not hold what its hash says"
                assert generation == cache.blocks.generation(page)
            assert (receiver, message.incarnation) == (f"a-{sender}", 1)
            self.kept.append((sender, message))
        super().put(sender, receiver, message, **more)

    def hashes(self, group: str = "") -> list[bytes]:
        return [one for name, message in self.kept for one in message.hashes if not group or name == group]


class Listed(World):
    """Notes how often agents are asked what they have on disk."""

    def __init__(self, **settings: Any) -> None:
        self.num_listed = 0
        super().__init__(**settings)

    def put(self, sender: str, receiver: str, message: Any, **more: Any) -> None:
        self.num_listed += isinstance(message, ListStoredPages)
        super().put(sender, receiver, message, **more)


def taught(stores: str = "write_through", **settings: Any) -> Taught:
    world = Taught(**{"num_pages": {"m": 60}, "stores": stores, **settings})
    world.settle()
    return world


def names_of(request: Any, extra_key: str = "") -> list[bytes]:
    """Hashes of all pages that a request has filled: the KV of its last token is not computed."""
    return chain_hashes(root_hash(extra_key), [*request.prompt, *request.output_ids][:-1], PAGE)


def serve(world: World, tokens: list[int], scheduler: str = "m", **more: Any) -> Any:
    request = world.submit(tokens, scheduler, ignore_eos=True, **more)
    world.settle()
    assert request.finish
    return request


def figures(world: World, name: str = "m") -> tuple[float, float]:
    stats = world.cores[name].stats()
    return stats["mesh_scheduler_pages_to_store_total"], stats["mesh_scheduler_pages_of_mixed_numerics_total"]


def test_without_the_setting_nothing_is_told_or_listened_to() -> None:
    world = taught("")
    serve(world, prompt(20))
    cache = world.cores["m"].books.cache
    assert (world.kept, cache.blocks.on_published, cache.on_reused) == ([], None, None)
    assert not [name for name in world.cores["m"].stats() if "store" in name]


def test_each_full_page_is_told_once_with_its_parent_before_it() -> None:
    world = taught()
    first = serve(world, prompt(21))
    assert world.hashes() == names_of(first)
    assert world.kept[0][1].parents[0] == root_hash()
    serve(world, prompt(21))
    assert world.hashes() == names_of(first), "it was found in the cache"
    other = serve(world, prompt(21), extra_key="tenant")
    assert world.hashes() == names_of(first) + names_of(other, "tenant")
    assert figures(world) == (len(world.hashes()), 0)


def test_a_turn_tells_once() -> None:
    world = taught(step_tokens=64, chunk_tokens=32)
    serve(world, prompt(24))
    assert len(world.kept[0][1].pages) == 6, "all pages of a chunk"


def test_selectively_a_page_is_told_when_it_is_used_again_and_once() -> None:
    world = taught("write_through_selective")
    first = serve(world, prompt(21))
    assert world.kept == []
    # The last token of a prompt is computed: its pages are those before it.
    serve(world, prompt(21))
    assert world.hashes() == names_of(first)[:5]
    serve(world, prompt(21))
    assert world.hashes() == names_of(first)[:5]
    serve(world, [*prompt(21), *first.output_ids])
    assert world.hashes() == names_of(first)


def test_a_page_that_was_evicted_and_computed_again_is_told_again() -> None:
    for stores in ("write_through", "write_through_selective"):
        world = taught(stores, num_pages={"m": 12})
        for base in (0, 1, 0, 0):
            serve(world, prompt(33, base), max_tokens=2)
        told = [name for name in world.hashes() if name in chain_hashes(root_hash(), prompt(33), PAGE)]
        assert len(set(told)) == 8
        # The first pages were in the cache all the time.
        assert len(told) == (14 if stores == "write_through" else 8), stores


@pytest.mark.parametrize("handed", [True, False])
def test_both_sides_of_a_handoff_tell_their_copies(handed: bool) -> None:
    world = taught(num_pages={"d": 60, "p": 60})
    request = serve(world, prompt(22), "d", prefill="p" if handed else "")
    assert world.hashes("d") == names_of(request)
    assert world.hashes("p") == (names_of(request)[:5] if handed else [])


class Unlike(Worker):
    """Computes with other numerics from some incarnation on."""

    numerics = "one"

    def adopted(self) -> Adopted:
        return msgspec.structs.replace(super().adopted(), numerics=self.numerics)


def members(world: World, **numerics: str) -> None:
    ready = {name: peer._replace(numerics=numerics.get(name, peer.numerics)) for name, peer in world.ready().items()}
    for name in world.cores:
        world.event(name, MembersChanged(ready))


def listing() -> Listed:
    world = Listed(num_pages={}, stores="write_through")
    world.add("m", 60)
    world.workers["w-m"] = Unlike(world.memories["m"])
    world.perform(world.cores["m"], world.cores["m"].start(world.now))
    members(world, m="one")
    world.settle()
    return world


def test_when_the_store_has_lost_its_pages_followers_forget_them_and_it_is_listed_again() -> None:
    world = listing()
    request = serve(world, prompt(21))
    world.published.clear()
    before = world.num_listed
    world.event("m", Told(Address("agent-m", 1), StoreChanged(group="m")))
    world.advance(world.now + GATHER_S)
    events = [event for _, topic, message in world.published if topic == "kv_events" for event in message.events]
    assert events[0] == CacheCleared(group="m", on_disk=False)
    index = CacheIndex(100)
    index.apply([PagesOnDisk(group="m", hashes=bytes(16)), *events])
    assert bytes(16) not in index
    assert all(name in index for name in names_of(request)), "what is cached, they know"
    assert world.num_listed == before + 1
    world.published.clear()
    world.event("m", FollowerReset("kv_events"))
    world.advance(world.now + RESTATE_PAUSE_S + GATHER_S)
    events = [event for _, topic, message in world.published if topic == "kv_events" for event in message.events]
    assert events[0] == CacheCleared(group="m", on_disk=True)


def test_the_disk_is_listed_when_a_worker_computes_otherwise_and_when_the_cache_is_stated_anew() -> None:
    world = listing()
    assert world.num_listed == 1
    world.event("m", FollowerReset("load"))
    assert world.num_listed == 1, "each load report is complete by itself"
    world.event("m", FollowerReset("kv_events"))
    assert world.num_listed == 2
    world.workers["w-m"].numerics = "two"
    world.restart_worker("m")
    world.settle()
    assert world.num_listed == 3


def test_where_pages_of_other_numerics_may_come_from_nothing_is_told() -> None:
    world = taught(num_pages={"d": 60, "p": 60})
    serve(world, prompt(22), "d", prefill="p")
    before = world.hashes()
    members(world, p="avx512")
    serve(world, prompt(22, 1), "d", prefill="p")
    serve(world, prompt(22, 2), "d")
    # It has left, but what it prefilled is here.
    members(world)
    serve(world, prompt(22, 3), "d")
    assert world.hashes() == before
    assert figures(world, "d")[1] == 7 * 3


def test_a_worker_that_computes_otherwise_than_its_predecessor_ends_it() -> None:
    world = taught(num_pages={})
    world.add("m", 60)
    worker = world.workers["w-m"] = Unlike(world.memories["m"])
    world.perform(world.cores["m"], world.cores["m"].start(world.now))
    members(world, m="one")
    world.settle()
    request = serve(world, prompt(21))
    assert {message.numerics for _, message in world.kept} == {"one"}
    assert world.hashes() == names_of(request)
    worker.numerics = "two"
    world.restart_worker("m")
    world.settle()
    serve(world, prompt(21, 1))
    assert world.hashes() == names_of(request)
    assert figures(world)[1] == 7


def other_parent(told: Any, self: PagesToStore, page: int, generation: int, own: bytes, _parent: bytes) -> None:
    told(self, page, generation, own, root_hash())


def other_generation(told: Any, self: PagesToStore, page: int, generation: int, own: bytes, parent: bytes) -> None:
    told(self, page, generation - 1, own, parent)


@pytest.mark.parametrize(
    ("name", "planted", "test"),
    [
        ("_on_published", other_parent, test_each_full_page_is_told_once_with_its_parent_before_it),
        ("_on_published", other_generation, test_each_full_page_is_told_once_with_its_parent_before_it),
        ("on_members", nothing, test_where_pages_of_other_numerics_may_come_from_nothing_is_told),
    ],
)
def test_planted_bugs_are_seen(name: str, planted: Any, test: Any) -> None:
    with around(PagesToStore, name, planted)(), pytest.raises(AssertionError):
        test()
    # The bug would be seen again by whoever looks at the end whether all is well there.
    World.unchecked.clear()
