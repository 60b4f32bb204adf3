"""Runs of entries written as columns, compared with the same entries written one by one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cache import page_table
from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import MAX_GENERATION, EntryRun, PageEntry, PageTable, Torn
from kvstore.hashing import NO_HASH, pack_tokens
from tests.kvstore.cache.pages import PAGE_SIZE, entries_of, make_table

NUM_PAGES = 16
HASHES = st.binary(min_size=16, max_size=16)


@pytest.fixture(autouse=True)
def always_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a run is."""
    monkeypatch.setattr(page_table, "_COLUMNS_FROM", 1)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], EntryRun]:
    """Some pages, each once, in any order, and entries for them."""
    pages = draw(st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, unique=True))
    num = len(pages)
    is_full = draw(st.booleans())
    state = draw(st.sampled_from(PageState))
    return pages, EntryRun(
        states=draw(st.lists(st.sampled_from(PageState), min_size=num, max_size=num) | st.just([state] * num)),
        generations=draw(st.lists(st.integers(0, MAX_GENERATION), min_size=num, max_size=num)),
        owner_epoch=draw(st.integers(0, 2**64 - 1)),
        page_hashes=draw(st.lists(HASHES, min_size=num, max_size=num)) if is_full else (),
        parent=draw(HASHES | st.just(NO_HASH)),
        tokens=draw(st.binary(min_size=4 * PAGE_SIZE * num, max_size=4 * PAGE_SIZE * num)) if is_full else b"",
        is_first=draw(st.booleans()),
        is_private=draw(st.booleans()),
    )


def write_one_by_one(table: PageTable, pages: list[int], run: EntryRun) -> None:
    for page, entry in zip(pages, entries_of(run), strict=True):
        table.write(page, entry)


def test_a_run_says_of_each_page_what_it_should() -> None:
    table, _ = make_table(NUM_PAGES)
    hashes = [bytes([one]) * 16 for one in (1, 2, 3)]
    states = [PageState.RUNNING, PageState.CACHED, PageState.CACHED]
    run = EntryRun(states, [7, 8, 9], 5, hashes, b"p" * 16, pack_tokens(range(12)), is_first=True)
    table.write_run([4, 2, 9], run)
    assert table.read(4) == PageEntry(
        PageState.RUNNING, 7, 5, hashes[0], b"p" * 16, pack_tokens(range(4)), is_first=True
    )
    assert table.read(2) == PageEntry(PageState.CACHED, 8, 5, hashes[1], hashes[0], pack_tokens(range(4, 8)))
    assert table.read(9) == PageEntry(PageState.CACHED, 9, 5, hashes[2], hashes[1], pack_tokens(range(8, 12)))
    table.write_run([2, 4], EntryRun([PageState.GRANTED] * 2, [10, 11], 5, parent=b"q" * 16, is_private=True))
    assert table.read(2) == PageEntry(PageState.GRANTED, 10, 5, parent_hash=b"q" * 16, is_private=True)
    assert table.read(4) == PageEntry(PageState.GRANTED, 11, 5, is_private=True)
    assert table.peek_generations([4, 2, 9, 1]) == [11, 10, 9, 0]


@given(
    history=st.lists(st.tuples(runs(), st.booleans(), st.booleans()), max_size=5),
    damaged=st.lists(st.integers(0, NUM_PAGES * 2 * (64 + 4 * PAGE_SIZE) - 1), max_size=3),
    last=runs(),
    columns_from=st.sampled_from([1, NUM_PAGES // 2, NUM_PAGES + 1]),
)
@settings(max_examples=150, deadline=None)
def test_runs_leave_the_bytes_that_single_writes_leave(
    history: list[tuple[tuple[list[int], EntryRun], bool, bool]],
    damaged: list[int],
    last: tuple[list[int], EntryRun],
    columns_from: int,
) -> None:
    """Whatever was there before, damage too, whoever wrote it, and whichever way."""
    page_table._COLUMNS_FROM = columns_from
    (columns, ours), (single, theirs) = make_table(NUM_PAGES), make_table(NUM_PAGES)
    for (pages, run), is_by_columns, is_replaced in history:
        if is_by_columns:
            columns.write_run(pages, run)
        else:
            write_one_by_one(columns, pages, run)
        write_one_by_one(single, pages, run)
        if is_replaced:
            columns, single = (PageTable(memoryview(memory), NUM_PAGES, PAGE_SIZE) for memory in (ours, theirs))
    for at in damaged:
        ours[at] ^= 0xFF
        theirs[at] ^= 0xFF
    columns.write_run(*last)
    write_one_by_one(single, *last)
    assert ours == theirs
    assert list(columns.scan()) == [(page, single.read(page)) for page in range(NUM_PAGES)]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"generations": [1, MAX_GENERATION + 1]}, "above the highest one"),
        ({"tokens": bytes(4 * PAGE_SIZE)}, "16 bytes of tokens are not 2 pages of 4"),
        ({"states": [PageState.FREE]}, "not of 2 pages"),
        ({"generations": [1]}, "not of 2 pages"),
        ({"page_hashes": [b"h" * 16]}, "not of 2 pages"),
    ],
)
def test_a_run_that_no_pages_have_is_refused(fields: dict[str, Any], why: str) -> None:
    table, memory = make_table()
    run = EntryRun([PageState.FREE] * 2, [1, 2], 1)._replace(**fields)
    with pytest.raises(ValueError, match=why):
        table.write_run([1, 2], run)
    assert not any(memory)


def test_nothing_is_a_run_too() -> None:
    table, memory = make_table()
    table.write_run([], EntryRun([], [], 1))
    assert not any(memory)


class Crash(Exception):
    """The writer died."""


def dying(store: int, landed: Callable[[Any], Any]) -> Callable[..., None]:
    """`PageTable._store` of a writer that dies inside its store number `store`.

    `landed` is given an array of the store's bytes, one row for each page, as zeros, and returns which of them land.
    """
    left = [store]

    def _store(field: Any, rows: Any, values: Any) -> None:
        if left[0]:
            left[0] -= 1
            field[rows] = values
            return
        before = field[rows].copy()
        after = before.copy()
        after[...] = values
        old, new = (np.frombuffer(one.tobytes(), np.uint8).reshape(len(rows), -1) for one in (before, after))
        field[rows] = np.frombuffer(np.where(landed(np.zeros_like(old)), new, old).tobytes(), field.dtype)
        raise Crash

    return _store


def cuts(seed: int) -> Iterator[Callable[[Any], Any]]:
    """Which bytes of a store land: any of them, those of some pages, all before a byte, all after it."""
    draw = np.random.default_rng(seed)
    yield lambda zeros: draw.integers(0, 2, zeros.shape, bool)
    yield lambda zeros: draw.integers(0, 2, (len(zeros), 1), bool) | zeros.astype(bool)
    for cut in range(3):
        yield lambda zeros, cut=cut: np.arange(zeros.size).reshape(zeros.shape) < cut * zeros.size // 2 - 1
        yield lambda zeros, cut=cut: np.arange(zeros.size).reshape(zeros.shape) > cut * zeros.size // 2


def found_after_deaths(
    monkeypatch: pytest.MonkeyPatch, history: list[tuple[list[int], EntryRun]], last: tuple[list[int], EntryRun]
) -> list[str]:
    """Pages that a reader finds neither as they were nor as they should be, over deaths in every step."""
    table, memory = make_table(NUM_PAGES)
    for pages, run in history:
        table.write_run(pages, run)
    before, old = bytes(memory), [table.read(page) for page in range(NUM_PAGES)]
    pages, run = last
    wrong: list[str] = []
    for store in range(len(page_table._STEPS)):
        for landed in cuts(store):
            memory[:] = before
            writer = PageTable(memoryview(memory), NUM_PAGES, PAGE_SIZE)
            with monkeypatch.context() as patch:
                patch.setattr(PageTable, "_store", staticmethod(dying(store, landed)))
                with pytest.raises(Crash):
                    writer.write_run(pages, run)
            reader = PageTable(memoryview(memory), NUM_PAGES, PAGE_SIZE)
            new = dict(zip(pages, entries_of(run), strict=True))
            for page in range(NUM_PAGES):
                found = reader.read(page)
                if found not in (old[page], new.get(page, old[page])):
                    wrong.append(f"page {page} in step {store}: {found}")
                elif not isinstance(found, Torn) and reader.peek_generations([page]) != [found.generation]:
                    wrong.append(f"generation of page {page} in step {store}")
            # Its successor writes over all of it.
            reader.write_run(list(range(NUM_PAGES)), EntryRun([PageState.FREE] * NUM_PAGES, [9] * NUM_PAGES, 2))
            wrong += [
                f"page {page} after step {store}"
                for page, entry in reader.scan()
                if entry != PageEntry(generation=9, owner_epoch=2)
            ]
    return wrong


@given(history=st.lists(runs(), max_size=3), last=runs())
@settings(max_examples=20, deadline=None)
def test_a_writer_that_stops_in_any_step_leaves_old_or_new(
    history: list[tuple[list[int], EntryRun]], last: tuple[list[int], EntryRun]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert found_after_deaths(monkeypatch, history, last) == []


@pytest.mark.parametrize(
    "steps",
    [
        ("body", "mark", "sequence", "unmark"),
        ("body", "sequence"),
        ("mark", "unmark", "body", "sequence"),
        ("mark", "body", "unmark", "sequence"),
    ],
    ids=["body before mark", "no mark", "unmarked before body", "unmarked before sequence"],
)
def test_each_other_order_is_caught(monkeypatch: pytest.MonkeyPatch, steps: tuple[str, ...]) -> None:
    """Planted: the test above sees what it is there to see."""
    monkeypatch.setattr(page_table, "_STEPS", steps)
    pages = list(range(NUM_PAGES))
    runs = [
        EntryRun([PageState.CACHED] * NUM_PAGES, [at + page for page in pages], 1, parent=bytes([at]) * 16)
        for at in (100, 130, 160)
    ]
    assert found_after_deaths(monkeypatch, [(pages, run) for run in runs[:2]], (pages, runs[2]))
