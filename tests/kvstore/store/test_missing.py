"""Why pages are missing, as it is remembered: beside a dictionary, and by what a store does."""

import errno

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.heads import hash_words
from kvstore.store.missing import (
    CHANGED,
    CORRUPT,
    EVICTED,
    FLUSHED,
    READ_ONLY,
    UNREADABLE,
    WRITE_FAILED,
    MissingPages,
)
from tests.kvstore.store.faulty_files import FaultyFiles
from tests.kvstore.store.pages import blank, chain, memory
from tests.kvstore.store.test_page_store import HASHES, NAMES, PAGE, Steps, failing

PAGES = [bytes([0, number % 3] * 4 + [number] * 8) for number in range(12)]
"""Some share their first words, and with them a chain."""


@given(size=st.integers(1, 6), told=st.lists(st.tuples(st.sampled_from(PAGES), st.sampled_from((EVICTED, CORRUPT)))))
def test_the_last_ones_are_remembered_with_what_became_of_them_last(size: int, told: list[tuple[bytes, str]]) -> None:
    missing = MissingPages(size)
    model: dict[bytes, str] = {}
    for page, why in told:
        if page not in model and len(model) == size:
            del model[next(iter(model))]
        model[page] = why
        missing.add(hash_words([page]), why)
        assert missing.whys(PAGES) == [model.get(one, "") for one in PAGES]


def test_more_than_are_remembered_at_once_leave_the_last() -> None:
    missing = MissingPages(4)
    missing.add_hashes(PAGES, EVICTED)
    missing.add_hashes([], CORRUPT)
    missing.add(np.zeros((0, 2), np.uint64), CORRUPT)
    assert missing.whys(PAGES) == [""] * 8 + [EVICTED] * 4


def test_a_store_remembers_what_it_gave_up_and_why() -> None:
    files = FaultyFiles(16, PAGE)
    steps = Steps(files)
    steps.run()
    whys = steps.store.missing.whys
    steps.write(NAMES[:4])
    ((_, second, *_), _) = steps.store.lookup(HASHES)
    files.flip("pages", PAGE * second)
    steps.read(HASHES[:4])
    files.fail = failing("read_pages", errno.EIO)
    slots, sequences = steps.store.lookup(HASHES[:1])
    steps.store.read(slots, sequences, blank(1, PAGE))
    steps.run()
    files.fail = failing("nothing", errno.EIO)
    begun = steps.store.begin_write(NAMES[4:6], memory(NAMES[4:6], PAGE))
    steps.run()
    assert begun is not None
    steps.store.commit(begun, [False, True])
    steps.run()
    assert whys(HASHES) == [UNREADABLE, CORRUPT, "", "", CHANGED, "", "", ""]
    assert steps.store.holds(HASHES) == [False, False, True, True, False, True, False, False]
    steps.store.flush()
    steps.run()
    assert whys(HASHES) == [UNREADABLE, CORRUPT, FLUSHED, FLUSHED, CHANGED, FLUSHED, "", ""]
    assert whys(HASHES[:0]) == []


def test_what_is_evicted_is_remembered() -> None:
    steps = Steps(FaultyFiles(4, PAGE))
    steps.run()
    steps.write(NAMES[:4])
    steps.write(chain("b", 3))
    held = steps.store.holds(HASHES[:4])
    assert held == [True, False, False, False]
    assert steps.store.missing.whys(HASHES[:4]) == ["", EVICTED, EVICTED, EVICTED]


def test_a_disk_that_takes_nothing_is_why() -> None:
    files = FaultyFiles(16, PAGE)
    steps = Steps(files)
    steps.run()
    files.fail = failing("write_pages", errno.ENOSPC)
    for number in range(8):
        names = chain(number, 1)
        write = steps.store.begin_write(names, memory(names, PAGE))
        assert write is not None
        steps.run()
        steps.store.commit(write, [True])
        steps.run()
        assert steps.store.missing.whys([names[0].page_hash]) == [WRITE_FAILED]
    assert steps.store.begin_write(NAMES, memory(NAMES, PAGE)) is None
    assert steps.store.missing.whys(HASHES) == [READ_ONLY] * 8


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_empty_store_holds_nothing(is_loaded: bool) -> None:
    steps = Steps(FaultyFiles(4, PAGE))
    if is_loaded:
        steps.run()
    assert steps.store.holds(HASHES) == [False] * 8
