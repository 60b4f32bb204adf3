import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.cache.allocator import PageAllocator, PageState, Violation, whole
from kvstore.errors import OwnershipError

NUM_PAGES = 12
MOVES = {
    "release": ({PageState.RUNNING}, PageState.FREE),
    "cache": ({PageState.RUNNING}, PageState.CACHED),
    "evict": ({PageState.CACHED}, PageState.FREE),
    "grant": ({PageState.RUNNING}, PageState.GRANTED),
    "start_transfer": ({PageState.GRANTED}, PageState.IN_FLIGHT),
    "accept": ({PageState.GRANTED, PageState.IN_FLIGHT}, PageState.RUNNING),
    "revoke": ({PageState.GRANTED, PageState.IN_FLIGHT}, PageState.FREE),
    "quarantine": (set(PageState) - {PageState.RESERVED}, PageState.QUARANTINED),
    "clear": ({PageState.QUARANTINED}, PageState.FREE),
}


class AllocatorMachine(RuleBasedStateMachine):
    """Against a list of states: every page is in exactly one, and only the drawn moves exist."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.model = [PageState.RESERVED] + [PageState.FREE] * (NUM_PAGES - 1)

    @rule(num_pages=st.integers(-1, NUM_PAGES))
    def allocate(self, num_pages: int) -> None:
        num_free = self.model.count(PageState.FREE)
        pages = self.allocator.allocate(num_pages)
        if num_pages > num_free:
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == max(0, num_pages)
        for page in pages:
            assert self.model[page] is PageState.FREE
            self.model[page] = PageState.RUNNING

    @rule(name=st.sampled_from(sorted(MOVES)), pages=st.lists(st.integers(-1, NUM_PAGES), max_size=4))
    def move_any(self, name: str, pages: list[int]) -> None:
        needed, target = MOVES[name]
        legal = len(set(pages)) == len(pages) and all(
            0 <= page < NUM_PAGES and self.model[page] in needed for page in pages
        )
        if legal:
            getattr(self.allocator, name)(pages)
            for page in pages:
                self.model[page] = target
        else:
            with pytest.raises(OwnershipError):
                getattr(self.allocator, name)(pages)

    @rule(name=st.sampled_from(sorted(MOVES)), data=st.data())
    def move_legally(self, name: str, data: st.DataObject) -> None:
        needed, target = MOVES[name]
        candidates = [page for page in range(NUM_PAGES) if self.model[page] in needed]
        if not candidates:
            return
        pages = data.draw(st.lists(st.sampled_from(candidates), unique=True))
        getattr(self.allocator, name)(pages)
        for page in pages:
            self.model[page] = target

    @rule(state=st.sampled_from(sorted(set(PageState) - {PageState.RESERVED, PageState.FREE})), data=st.data())
    def adopt(self, state: PageState, data: st.DataObject) -> None:
        free = [page for page in range(NUM_PAGES) if self.model[page] is PageState.FREE]
        if free:
            page = data.draw(st.sampled_from(free))
            self.allocator.adopt([page], state)
            self.model[page] = state

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        assert [self.allocator.state(page) for page in range(NUM_PAGES)] == self.model
        for state in PageState:
            assert self.allocator.count(state) == self.model.count(state)
        assert self.allocator.num_free == self.model.count(PageState.FREE)
        assert whole(self.allocator.checking(bytearray(self.model))) == []


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_low_pages_come_first_and_in_runs() -> None:
    allocator = PageAllocator(10)
    assert allocator.allocate(4) == [1, 2, 3, 4]
    allocator.release([2, 3])
    assert allocator.allocate(3) == [2, 3, 5]


def test_the_smallest_pool() -> None:
    assert PageAllocator(2).allocate(1) == [1]
    with pytest.raises(ValueError, match="at least 2 pages"):
        PageAllocator(1)


def test_refusal_says_page_state_and_need() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(OwnershipError, match="page 1 is FREE, but this move needs it GRANTED or IN_FLIGHT") as caught:
        allocator.accept([1])
    assert (caught.value.page, caught.value.code) == (1, "page_ownership")
    with pytest.raises(OwnershipError, match="not in the pool"):
        allocator.quarantine([4])
    with pytest.raises(OwnershipError, match="named twice"):
        allocator.adopt([2, 2], PageState.RUNNING)


def test_check_quarantines_what_holders_see_differently() -> None:
    allocator = PageAllocator(6)
    allocator.allocate(3)
    allocator.cache([2])
    claims = bytearray([PageState.RESERVED, PageState.RUNNING, PageState.RUNNING, 0, PageState.RUNNING, 0])
    violations = whole(allocator.checking(claims))
    told = [(2, "CACHED", "RUNNING"), (3, "RUNNING", "FREE"), (4, "FREE", "RUNNING")]
    assert violations == [Violation(*one) for one in told]
    states = [PageState.RUNNING, *[PageState.QUARANTINED] * 3, PageState.FREE]
    assert [allocator.state(page) for page in range(1, 6)] == states
    assert allocator.num_free == 1
    assert whole(allocator.checking(claims)) == []


def test_check_repairs_a_damaged_free_list() -> None:
    """By private names: no move that the allocator has does such damage."""
    allocator = PageAllocator(6)
    allocator.allocate(1)
    allocator._free.append(1)
    allocator._free.append(3)
    allocator._free.remove(5)
    assert {violation.page for violation in whole(allocator.checking())} == {1, 3, 5}
    assert whole(allocator.checking()) == []
    assert sorted(allocator.allocate(2) or []) == [2, 4]


def test_check_repairs_a_page_zero_in_the_free_list_and_wrong_counts() -> None:
    allocator = PageAllocator(4)
    allocator._free.append(0)
    assert [violation.page for violation in whole(allocator.checking())] == [0]
    assert allocator.state(0) is PageState.RESERVED
    allocator._counts[PageState.CACHED] += 1
    whole(allocator.checking())
    assert allocator.count(PageState.CACHED) == 0
    assert sum(allocator.count(state) for state in PageState) == 4
