"""What a tokenizer knows of one scheduler's cache, and of what has left it for the disk."""

from kvstore.protocol import CacheCleared, PageRemoved, PagesOnDisk, PagesStored
from nodes.tokenizer.routing.cache_index import CacheIndex


def stored(*names: bytes) -> PagesStored:
    return PagesStored(group="d", page_hashes=list(names), parent_hash=b"", tokens=bytes(4 * len(names)))


def removed(*names: bytes, on_disk: bool) -> PageRemoved:
    return PageRemoved(group="d", page_hashes=list(names), on_disk=on_disk)


def index(*names: bytes, max_pages: int = 9) -> CacheIndex:
    made = CacheIndex(max_pages)
    for name in names:
        made.apply([stored(name)])
    return made


def test_a_page_that_left_the_cache_is_there_only_if_a_disk_may_have_it() -> None:
    known = index(b"a", b"b")
    known.apply([removed(b"a", on_disk=False)])
    known.apply([removed(b"b", on_disk=True)])
    assert (b"a" in known, b"b" in known, len(known)) == (False, True, 1)
    known.apply([stored(b"b")])
    assert len(known) == 1, "a page is in one of the two"


def test_a_cache_stated_anew_leaves_what_a_disk_may_have() -> None:
    for on_disk in (True, False):
        known = index(b"a", b"b")
        known.apply([removed(b"b", on_disk=True)])
        known.apply([CacheCleared(group="d", on_disk=on_disk)])
        assert [name in known for name in (b"a", b"b")] == [on_disk, on_disk]


def test_of_both_the_oldest_are_forgotten() -> None:
    known = index(b"a", b"b", b"c", max_pages=2)
    assert [name in known for name in (b"a", b"b", b"c")] == [False, True, True]
    known.apply([removed(b"x", b"y", b"b", on_disk=True)])
    assert [name in known for name in (b"x", b"y", b"b", b"c")] == [False, True, True, True]
    known.apply([stored(b"c", b"d", b"e"), stored(b"d", b"f")])
    assert [name in known for name in (b"c", b"d", b"e", b"f")] == [False, True, False, True]
    large = index(max_pages=640)
    large.apply([stored(*(bytes([1, *number.to_bytes(2)]) for number in range(641)))])
    assert len(large) == 630, "more than must, since to find the oldest takes time"


def test_what_is_not_known_any_more_may_be_on_the_disk_all_the_same() -> None:
    known = index(b"a", b"b")
    known.apply([removed(b"b", on_disk=True)])
    known.clear()
    assert [name in known for name in (b"a", b"b")] == [False, True]


def test_pages_that_a_disk_is_said_to_have_are_there_and_those_that_are_cached_stay_so() -> None:
    cached, on_disk = bytes(16), bytes(range(16))
    known = index(cached)
    known.apply([PagesOnDisk(group="d", hashes=cached + on_disk + b"half")])
    assert [name in known for name in (cached, on_disk, b"half")] == [True, True, False]
    assert len(known) == 2, "a page is in one of the two"
    known.clear()
    assert [name in known for name in (cached, on_disk)] == [False, True]
