import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import HEADER_BYTES, MAX_GENERATION, PageEntry, PageTable, Torn
from kvstore.hashing import pack_tokens, unpack_tokens
from tests.kvstore.cache.pages import PAGE_SIZE, make_table

SLOT_BYTES = HEADER_BYTES + 4 * PAGE_SIZE
U64 = st.integers(0, 2**64 - 1)

ENTRIES = st.builds(
    PageEntry,
    state=st.sampled_from(PageState),
    generation=st.integers(0, MAX_GENERATION),
    owner_epoch=U64,
    page_hash=st.binary(min_size=16, max_size=16),
    parent_hash=st.binary(min_size=16, max_size=16),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=PAGE_SIZE).map(pack_tokens),
    is_first=st.booleans(),
    is_private=st.booleans(),
)


def reopened(memory: bytearray) -> PageTable:
    """As the next writer finds it."""
    return PageTable(memoryview(memory), 4, PAGE_SIZE)


def check_writable(memory: bytearray, page: int) -> None:
    """Whatever became of a page, the next writer's entries are read again."""
    successor = reopened(memory)
    for generation in (10, 11, 12):
        successor.write(page, PageEntry(generation=generation))
        assert successor.read(page) == PageEntry(generation=generation)


def test_entry_tells_its_tokens() -> None:
    entry = PageEntry(tokens=pack_tokens([7, 8, 9]))
    assert entry.fill == 3
    assert unpack_tokens(entry.tokens) == (7, 8, 9)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": pack_tokens(range(5))}, "5 tokens do not fit in a page of 4"),
        ({"generation": MAX_GENERATION + 1}, "above the highest one"),
    ],
)
def test_an_entry_that_no_page_has_is_refused(fields: dict[str, Any], why: str) -> None:
    table, _ = make_table()
    with pytest.raises(ValueError, match=why):
        table.write(1, PageEntry(**fields))
    assert table.read(1) == PageEntry()


def test_a_view_too_small_is_refused() -> None:
    for view in (memoryview(bytearray(10)), memoryview(bytearray(8 * 1000)).cast("Q")):
        with pytest.raises(ValueError, match="plain bytes"):
            PageTable(view, 4, PAGE_SIZE)


class Crash(Exception):
    """The writer died."""


class MortalMemory:
    """A table's memory whose writer dies inside its store number `store`, after the bytes of it that `landed` names."""

    format = "B"

    def __init__(self, memory: bytearray, store: int, landed: Callable[[int], bool]) -> None:
        self.memory = memory
        self.store = store
        self.landed = landed

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, where: slice) -> bytearray:
        return self.memory[where]

    def __setitem__(self, where: slice, value: bytes) -> None:
        assert len(value) == where.stop - where.start
        if self.store:
            self.store -= 1
            self.memory[where] = value
            return
        for index, byte in enumerate(bytes(value)):
            if self.landed(index):
                self.memory[where.start + index] = byte
        raise Crash


STORE_BYTES = [2, SLOT_BYTES - 8, 6, 2]
NUM_STORES = len(STORE_BYTES)


def write_and_die(memory: bytearray, page: int, entry: PageEntry, store: int, landed: Callable[[int], bool]) -> None:
    writer = PageTable(MortalMemory(memory, store, landed), 4, PAGE_SIZE)  # type: ignore[arg-type]
    with pytest.raises(Crash):
        writer.write(page, entry)


@given(st.lists(ENTRIES, max_size=4), ENTRIES)
@settings(max_examples=30, deadline=None)
def test_a_writer_that_stops_at_any_byte_leaves_old_or_new(history: list[PageEntry], entry: PageEntry) -> None:
    table, memory = make_table()
    for old in history:
        table.write(1, old)
    before = bytes(memory)
    for store in range(NUM_STORES):
        for cut in range(STORE_BYTES[store] + 1):
            for forward in (True, False):
                memory[:] = before
                write_and_die(memory, 1, entry, store, lambda index, c=cut, f=forward: (index < c) is f)
                assert table.read(1) in ((history or [PageEntry()])[-1], entry)
                assert table.read(0) == table.read(2) == PageEntry()


def test_a_write_is_the_stores_that_these_tests_tear() -> None:
    _, memory = make_table()
    PageTable(MortalMemory(memory, NUM_STORES, lambda _: False), 4, PAGE_SIZE).write(1, PageEntry())  # type: ignore[arg-type]
    write_and_die(memory, 1, PageEntry(), NUM_STORES - 1, lambda _: False)


@pytest.mark.parametrize("written", [1, 2, 3])
def test_damage_to_both_slots_is_known(written: int) -> None:
    table, memory = make_table()
    for generation in range(written):
        table.write(3, PageEntry(state=PageState.CACHED, generation=generation + 1, tokens=pack_tokens([1])))
    start = 3 * 2 * SLOT_BYTES
    for slot in range(2):
        memory[start + slot * SLOT_BYTES + 20] ^= 0xFF
    assert table.read(3) == Torn()
    assert table.generation(3) is None
    check_writable(memory, 3)


def test_an_entry_copied_to_another_page_is_not_believed() -> None:
    table, memory = make_table()
    table.write(1, PageEntry(state=PageState.CACHED, generation=9))
    table.write(1, PageEntry(state=PageState.CACHED, generation=10))
    memory[4 * SLOT_BYTES : 6 * SLOT_BYTES] = memory[2 * SLOT_BYTES : 4 * SLOT_BYTES]
    assert table.read(2) == Torn()


@pytest.mark.parametrize("written", [2, 3])
def test_an_older_entry_that_is_gone_is_damage(written: int) -> None:
    table, memory = make_table()
    for generation in range(written):
        table.write(2, PageEntry(generation=generation + 1))
    older = 2 * 2 + (written + 1) % 2
    memory[older * SLOT_BYTES : (older + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
    assert table.read(2) == Torn()


def test_a_state_of_a_later_format_is_not_believed() -> None:
    table, _ = make_table()
    for _ in range(2):
        table.write(1, PageEntry(state=99))  # type: ignore[arg-type]
        assert table.read(1) == Torn()


def sealed(page: int, sequence: int, state: int, fill: int, generation: int) -> bytes:
    """A slot as a foreign writer makes it: its CRC is right."""
    checked = struct.pack("<BBHQQ", state, 0, fill, generation, 1) + bytes(32 + 4 * PAGE_SIZE)
    crc = zlib.crc32(checked, (page * 0x9E3779B1 ^ sequence ^ sequence >> 32) & 0xFFFFFFFF)
    return struct.pack("<QI", sequence, crc) + checked


@pytest.mark.parametrize(
    ("sequence", "state", "fill", "generation"),
    [
        (3, PageState.RUNNING, PAGE_SIZE + 1, 5),
        (3, PageState.RUNNING, 2**16 - 1, 5),
        (3, PageState.RUNNING, 0, MAX_GENERATION + 1),
        (3, PageState.RUNNING, 0, 2**64 - 1),
        (3, len(PageState), 0, 5),
        (2**47 + 1, PageState.RUNNING, 0, 5),
        (2**64 - 1, PageState.RUNNING, 0, 5),
    ],
)
def test_what_no_writer_of_ours_can_have_written_is_not_believed(
    sequence: int, state: int, fill: int, generation: int
) -> None:
    table, memory = make_table()
    table.write(1, PageEntry(PageState.CACHED, 3))
    table.write(1, PageEntry(PageState.CACHED, 4))
    memory[3 * SLOT_BYTES : 4 * SLOT_BYTES] = sealed(1, 3, PageState.RUNNING, 1, 5)
    assert reopened(memory).generation(1) == 5, "the writer is foreign, not its form"
    memory[3 * SLOT_BYTES : 4 * SLOT_BYTES] = sealed(1, sequence, state, fill, generation)
    assert reopened(memory).read(1) == Torn()
    check_writable(memory, 1)


@given(num_writes=st.integers(1, 5), data=st.data())
def test_damage_never_brings_an_older_entry_back(num_writes: int, data: st.DataObject) -> None:
    """What a writer that stopped leaves is told from what damage leaves, whichever bytes of the two slots it hits."""
    table, memory = make_table()
    for generation in range(1, num_writes + 1):
        table.write(2, PageEntry(PageState.CACHED, generation, 1, b"h" * 16, b"p" * 16, pack_tokens([generation])))
    newest = table.read(2)
    begin, size = 4 * SLOT_BYTES, 2 * SLOT_BYTES
    at = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, size - at))
    fill = data.draw(
        st.one_of(
            st.sampled_from([b"\0", b"\xff"]).map(lambda one: one * length), st.binary(min_size=length, max_size=length)
        )
    )
    memory[begin + at : begin + at + length] = fill
    found = reopened(memory).read(2)
    # Bytes that happen to be a mark, or zeros over a page written once, are what a writer that stopped leaves.
    is_as_if_never_written = found == PageEntry() or num_writes <= 2
    assert found in (newest, Torn()) or is_as_if_never_written or b"\xa5\xc3" in fill
    check_writable(memory, 2)


def test_where_stores_are_not_ordered_a_sequence_seen_before_its_entry_is_not_believed() -> None:
    """As on ARM: the third entry's sequence is visible, and of what was written ahead of it nothing."""
    table, memory = make_table()
    for generation in (1, 2, 3):
        table.write(2, PageEntry(generation=generation))
        if generation == 2:
            begin = (2 * 2 + 1) * SLOT_BYTES
            first = bytes(memory[begin : begin + SLOT_BYTES])
    memory[begin + 6 : begin + SLOT_BYTES] = first[6:]
    assert struct.unpack_from("<Q", memory, begin) == (3,)
    ordered = PageTable(memoryview(memory), 4, PAGE_SIZE, stores_are_ordered=True)
    assert ordered.peek_generations([2]) == [1], "two entries ago: the page has been another's since"
    unordered = PageTable(memoryview(memory), 4, PAGE_SIZE, stores_are_ordered=False)
    assert unordered.peek_generations([2, 1]) == [-1, 0]
    table.write(2, PageEntry(generation=4))
    table.write(2, PageEntry(generation=5))
    assert unordered.peek_generations([2]) == [5]


class TableMachine(RuleBasedStateMachine):
    """Writers come and go, each may die inside a write; readers always see the last entry that was whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory = make_table()
        self.reader = PageTable(memoryview(self.memory).toreadonly(), 4, PAGE_SIZE)
        self.model = [PageEntry()] * 4

    @rule(page=st.integers(0, 3), entry=ENTRIES)
    def write(self, page: int, entry: PageEntry) -> None:
        self.table.write(page, entry)
        self.model[page] = entry

    @rule(
        page=st.integers(0, 3),
        entry=ENTRIES,
        store=st.integers(0, NUM_STORES - 1),
        mask=st.integers(0, 2**SLOT_BYTES - 1),
    )
    def die_while_writing(self, page: int, entry: PageEntry, store: int, mask: int) -> None:
        """Any subset of one store's bytes lands; the next writer may die over the same slot, again and again."""
        write_and_die(self.memory, page, entry, store, lambda index: bool(mask >> index & 1))
        found = self.reader.read(page)
        assert found in (self.model[page], entry)
        assert isinstance(found, PageEntry)
        self.model[page] = found
        self.table = reopened(self.memory)

    @rule()
    def replace_the_writer(self) -> None:
        self.table = reopened(self.memory)

    @rule(page=st.integers(0, 3), at=st.integers(0, 2 * SLOT_BYTES - 1), byte=st.integers(0, 255))
    def damage(self, page: int, at: int, byte: int) -> None:
        """Whatever becomes of a page, all of them scanned are what each of them read is."""
        before = bytes(self.memory)
        self.memory[2 * page * SLOT_BYTES + at] = byte
        assert list(self.reader.scan()) == [(one, self.reader.read(one)) for one in range(4)]
        self.memory[:] = before

    @invariant()
    def readers_agree(self) -> None:
        assert [entry for _, entry in self.reader.scan()] == self.model
        assert [self.table.generation(page) for page in range(4)] == [entry.generation for entry in self.model]
        assert self.reader.peek_generations([3, 1, 1]) == [self.model[page].generation for page in (3, 1, 1)]
        assert self.reader.peek_generations([]) == []
        unordered = PageTable(memoryview(self.memory), 4, PAGE_SIZE, stores_are_ordered=False)
        assert unordered.peek_generations([3, 1, 1]) == [self.model[page].generation for page in (3, 1, 1)]


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
