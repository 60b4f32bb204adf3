"""Pages restored from a store by the puller that moves pages between pools, which knows nothing of stores."""

import errno
import threading
from collections.abc import Iterator

import msgspec
import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PagesElsewhere, PoolMismatch, TransferError
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from kvstore.protocol import PoolHandle
from kvstore.store.page_store import PageStore, StoreLimits
from kvstore.store.pool_writes import PoolWrites, Storable
from kvstore.store.source import StoreTransport
from kvstore.transfer.base import SourcePages, Transfer
from kvstore.transfer.plan import Descriptor
from kvstore.transfer.puller import UNEQUAL_RANKS, Ended, PagePuller
from kvstore.transfer.session import StartCopy
from tests.kvstore.store.faulty_files import FaultyFiles, SteppedLane
from tests.kvstore.store.pages import chain, content

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
SIZE = LAYOUT.page_bytes
NUM_PAGES = 17
NEVER = 1e9
NAMES = chain("a", 6)
HASHES = [name.page_hash for name in NAMES]
TARGETS = [4, 5, 6, 9, 1, 2]


class Restoring:
    """A store that holds `NAMES`, stored from one group's pools, and another group whose pools it is read into."""

    def __init__(self, tp_size: int = 1, num_slots: int = 12, limits: StoreLimits | None = None) -> None:
        self.tp_size = tp_size
        self.lanes = SteppedLane(), SteppedLane(), SteppedLane()
        self.files = FaultyFiles(num_slots, SIZE * tp_size)
        self.store = PageStore(self.files, SIZE * tp_size, lambda: None, limits or StoreLimits(), self.lanes)
        self.writes = PoolWrites(self.store)
        self.transport = StoreTransport(self.store, self.writes)
        self.puller = PagePuller(self.transport)
        self.host = HeapHost()
        self.near, self.far = self.pools("d"), self.pools("p")
        self.puller.add("d", self.near)
        self.writes.add("p", self.far)
        self.now = 0.0
        self.ended: dict[int, str] = {}
        self.good: dict[int, int] = {}
        self.moved = 0
        self.store_pages("a", 6)
        self.peers = [self.transport.connect(self.handle(rank)) for rank in range(tp_size)]

    def layout(self, rank: int) -> KVLayout:
        return msgspec.structs.replace(LAYOUT, tp_rank=rank, tp_size=self.tp_size)

    def pools(self, group: str) -> list[PagePool]:
        made: list[PagePool] = []
        for rank in range(self.tp_size):
            info = PoolInfo(group=group, num_pages=NUM_PAGES, layout=self.layout(rank), incarnation=1)
            made.append(self.host.create(f"{group}.{rank}", info))
        for page in range(1, NUM_PAGES):
            made[0].table().write(page, PageEntry(PageState.RUNNING, generation=100 + page))
        return made

    def handle(self, rank: int) -> PoolHandle:
        return PoolHandle(
            group="disk", agent="a", path="", num_pages=self.store.num_slots, layout=self.layout(rank), incarnation=1
        )

    def store_pages(self, prompt: str, count: int) -> None:
        names = chain(prompt, count)
        for page, name in enumerate(names, 1):
            for rank, pool in enumerate(self.far):
                pool.page(page)[:] = content(name.page_hash, SIZE * self.tp_size)[rank * SIZE :][:SIZE]
        self.run()
        self.writes.offer("p", [Storable(page, 100 + page, name) for page, name in enumerate(names, 1)])
        self.run()
        assert self.writes.is_idle

    def pump(self) -> None:
        for ended in self.puller.pump(self.now):
            self.note(ended)

    def note(self, ended: Ended) -> None:
        assert ended.event.copy_id not in self.ended, "a copy ends once"
        self.ended[ended.event.copy_id] = ended.event.code
        self.good[ended.event.copy_id] = ended.event.num_good
        self.moved += ended.num_bytes

    def run(self) -> None:
        self.pump()
        while any(lane.waiting for lane in self.lanes):
            for lane in self.lanes:
                lane.close()
            self.pump()

    def start(self, copy_id: int = 1, deadline: float = NEVER, targets: list[int] = TARGETS) -> None:
        slots, sequences = self.store.lookup(HASHES)
        order = StartCopy(copy_id, slots, sequences, targets, [100 + target for target in targets], deadline)
        ended = self.puller.start("grant", order, "d", self.peers)
        if ended is not None:
            self.note(ended)

    def num_right(self, targets: list[int] = TARGETS) -> int:
        pages = [b"".join(pool.page(target) for pool in self.near) for target in targets]
        wanted = [content(page_hash, SIZE * self.tp_size) for page_hash in HASHES]
        return sum(page == right for page, right in zip(pages, wanted, strict=True))


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def restoring(request: pytest.FixtureRequest) -> Iterator[Restoring]:
    restoring = Restoring(request.param)
    yield restoring
    restoring.run()
    assert restoring.transport.num_posted == 0
    assert not restoring.puller.is_busy
    restoring.transport.close()


def test_pages_come_into_the_pools_of_all_ranks(restoring: Restoring) -> None:
    restoring.start()
    assert restoring.num_right() == 0
    assert restoring.transport.num_posted == restoring.tp_size
    assert restoring.transport.pause_s > 0
    restoring.run()
    assert restoring.ended == {1: ""}
    assert restoring.num_right() == 6
    assert restoring.moved == 6 * SIZE * restoring.tp_size


def test_two_copies_of_the_same_pages_both_come(restoring: Restoring) -> None:
    others = [10, 11, 12, 13, 14, 15]
    restoring.start(1)
    restoring.start(2, targets=others)
    restoring.run()
    assert restoring.ended == {1: "", 2: ""}
    assert (restoring.num_right(), restoring.num_right(others)) == (6, 6)


def test_a_slot_that_is_given_away_makes_the_copy_stale(restoring: Restoring) -> None:
    restoring.start()
    # Written while the read waits for the disk.
    for prompt in ("b", "c"):
        names = chain(prompt, 6)
        restoring.writes.offer("p", [Storable(page, 100 + page, name) for page, name in enumerate(names, 1)])
        for _ in range(6):
            for lane in restoring.lanes[1:]:
                lane.close()
            restoring.pump()
    restoring.run()
    assert restoring.ended == {1: "stale_pages"}


def test_a_target_that_is_used_again_makes_the_copy_stale(restoring: Restoring) -> None:
    restoring.start()
    restoring.near[0].table().write(TARGETS[0], PageEntry(PageState.RUNNING, generation=999))
    restoring.run()
    assert restoring.ended == {1: "stale_pages"}
    assert restoring.good == {1: 0}


@pytest.mark.parametrize("at", [0, 1, 3])
def test_pages_before_a_wrong_one_are_good_up_to_a_target_that_is_used_again(restoring: Restoring, at: int) -> None:
    restoring.files.flip("pages", restoring.store.lookup(HASHES)[0][2] * SIZE * restoring.tp_size)
    restoring.start()
    restoring.near[0].table().write(TARGETS[at], PageEntry(PageState.RUNNING, generation=999))
    restoring.run()
    assert restoring.ended == {1: "corrupt_pages"}
    assert restoring.good == {1: min(at, 2)}


@pytest.mark.parametrize("code", ["corrupt_pages", "read_failed"])
def test_what_the_disk_has_lost_ends_the_copy_and_is_a_miss_from_then_on(restoring: Restoring, code: str) -> None:
    slot = restoring.store.lookup(HASHES)[0][2]
    if code == "corrupt_pages":
        restoring.files.flip("pages", slot * SIZE * restoring.tp_size)
    restoring.start()
    if code == "read_failed":

        def fail(name: str, first: int) -> None:
            if name == "read_pages":
                raise OSError(errno.EIO, "it fails")

        restoring.files.fail = fail
    restoring.run()
    assert restoring.ended == {1: code}
    # What comes before it is as good as if nothing had been asked beyond it.
    assert restoring.good == {1: 2 if code == "corrupt_pages" else 0}
    assert restoring.num_right() >= restoring.good[1]
    assert len(restoring.store.lookup(HASHES)[0]) == (2 if code == "corrupt_pages" else 0)


def test_a_copy_that_is_cancelled_ends_when_nothing_writes_any_more(restoring: Restoring) -> None:
    restoring.start()
    restoring.puller.cancel("grant", 1)
    restoring.pump()
    assert restoring.ended == {}, "the disk may still write"
    restoring.run()
    assert restoring.ended == {1: "cancelled"}
    assert restoring.good == {1: 0} or restoring.num_right() == len(TARGETS)


def test_a_copy_that_is_late_ends_when_nothing_writes_any_more(restoring: Restoring) -> None:
    restoring.start(deadline=5.0)
    restoring.now = 5.0
    restoring.pump()
    assert restoring.ended == {}
    restoring.run()
    assert restoring.ended == {1: "deadline_exceeded"}


def test_a_store_that_is_disconnected_ends_its_copies_and_begins_no_others(restoring: Restoring) -> None:
    restoring.start(1)
    restoring.transport.disconnect(restoring.peers[0])
    restoring.start(2)
    restoring.run()
    assert restoring.ended == {1: "source_lost", 2: "source_lost"}


def test_too_much_at_once_waits_and_may_be_cancelled_meanwhile() -> None:
    restoring = Restoring(2, limits=StoreLimits(reading_bytes=6 * 2 * SIZE))
    for number in (1, 2, 3):
        restoring.start(number, targets=[10, 11, 12, 13, 14, 15])
    assert restoring.store.stats()["reading bytes"] == 6 * 2 * SIZE
    assert restoring.transport.num_posted == 3 * 2
    restoring.puller.cancel("grant", 2)
    restoring.run()
    assert restoring.ended == {1: "", 2: "cancelled", 3: ""}


def transfer(restoring: Restoring, rank: int = 0, parts: list[Descriptor] | None = None, **given: object) -> Transfer:
    slots, sequences = restoring.store.lookup(HASHES[:2])
    whole = [Descriptor(4 * SIZE, slots[0] * SIZE, 2 * SIZE)]
    source = SourcePages(slots, sequences)
    options = {"source": source} | given
    return Transfer(restoring.near[rank], restoring.peers[rank], parts or whole, 9.0, **options)  # type: ignore[arg-type]


def test_a_copy_whose_other_ranks_never_come_ends_at_once() -> None:
    restoring = Restoring(2)
    for end in ("cancel", "deadline", "disconnect"):
        lone = transfer(restoring)
        restoring.transport.post(lone)
        assert restoring.transport.poll(0.0) == []
        if end == "cancel":
            restoring.transport.cancel(lone)
        elif end == "disconnect":
            restoring.transport.disconnect(restoring.peers[0])
        assert restoring.transport.poll(9.0 if end == "deadline" else 0.0) == [lone]
        assert lone.error is not None
    restoring.transport.close()


def test_what_is_not_whole_pages_in_order_is_refused() -> None:
    restoring = Restoring()
    slots, _ = restoring.store.lookup(HASHES[:2])
    at = slots[0] * SIZE
    for parts in (
        [Descriptor(0, at, SIZE)],
        [Descriptor(0, at + 4, 2 * SIZE)],
        [Descriptor(0, at, SIZE), Descriptor(SIZE, at + SIZE, SIZE - 4)],
        [Descriptor(0, at + SIZE, SIZE), Descriptor(SIZE, at, SIZE)],
        [Descriptor(0, 12 * SIZE, SIZE)],
    ):
        with pytest.raises(TransferError) as raised:
            restoring.transport.post(transfer(restoring, parts=parts))
        assert raised.value.code == "bad_descriptor"
    with pytest.raises(TransferError, match="not the pages"):
        restoring.transport.post(transfer(restoring, source=None))
    assert restoring.transport.num_posted == 0


def test_pools_of_other_pages_or_on_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    restoring = Restoring()
    for fields in ({"num_pages": 99}, {"layout": msgspec.structs.replace(LAYOUT, page_size=8)}):
        with pytest.raises(PoolMismatch, match="over all ranks"):
            restoring.transport.connect(msgspec.structs.replace(restoring.handle(0), **fields))
    monkeypatch.setattr(restoring.near[0], "info", msgspec.structs.replace(restoring.near[0].info, device="cuda:0"))
    with pytest.raises(PagesElsewhere, match="disk moves only cpu pages"):
        restoring.transport.register(restoring.near[0])


def test_a_group_of_another_number_of_ranks_is_refused() -> None:
    restoring = Restoring(2)
    restoring.puller.add("d", restoring.near[:1])
    restoring.start()
    assert restoring.ended == {1: UNEQUAL_RANKS}


def test_draining_waits_for_what_the_disk_has_begun() -> None:
    restoring = Restoring()
    begun, may_end = threading.Event(), threading.Event()

    def fail(name: str, first: int) -> None:
        begun.set()
        may_end.wait()

    restoring.start()
    restoring.files.fail = fail
    disk = threading.Thread(target=lambda: [lane.close() for lane in restoring.lanes])
    drained: list[Transfer] = []
    draining = threading.Thread(target=lambda: drained.extend(restoring.transport.drain()))
    for thread in (disk, draining):
        thread.start()
    assert begun.wait(30)
    # It polls once before it waits, and then nothing is to be polled until the disk is done.
    assert not drained
    assert draining.is_alive()
    may_end.set()
    for thread in (disk, draining):
        thread.join(30)
    assert [one.error.code for one in drained if one.error] == ["cancelled"]
    assert restoring.transport.num_posted == 0
    assert restoring.num_right() == 6
