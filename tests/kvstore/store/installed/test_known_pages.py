"""Numbers of pages against a model: each page's own as long as it has one, none of them given twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.installed.known_pages import KnownPages

PAGES = [bytes([number]) * 16 for number in range(8)]


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.sampled_from(PAGES)), max_size=60))
def test_it_is_what_the_model_is(num_slots: int, steps: list[tuple[bool, bytes]]) -> None:
    known = KnownPages(num_slots)
    # Least recently used first, as the dictionary keeps them.
    model: dict[bytes, tuple[int, int]] = {}
    given_before: set[int] = set()
    for is_number, page in steps:
        if not is_number:
            known.drop(page)
            model.pop(page, None)
        else:
            found = known.number(page)
            before = model.pop(page, None)
            if before is None:
                assert found[1] not in given_before, "a sequence is given once"
                if len(model) == num_slots:
                    del model[next(iter(model))]
            else:
                assert found == before
            given_before.add(found[1])
            model[page] = found
        assert len(known) == len(model) <= num_slots
        assert {one for one in PAGES if one in known} == set(model)
        assert len({slot for slot, _ in model.values()}) == len(model)
        slots, sequences = [slot for slot, _ in model.values()], [sequence for _, sequence in model.values()]
        assert known.sequences(slots) == sequences
        assert [known.hash_at(slot) for slot in slots] == list(model)
        free = sorted(set(range(num_slots)) - set(slots))
        assert known.sequences(free) == [0] * len(free)


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_that_there_are_not(slot: int) -> None:
    with pytest.raises(ValueError, match="not all among 4"):
        KnownPages(4).sequences([0, slot])
    assert KnownPages(4).sequences([]) == []
