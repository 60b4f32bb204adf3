"""The file of a gateway's open calls: whatever becomes of the gateway, what it has is read."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodes.gateway.records.open_calls import NONE, NUM_SLOTS, SLOT_BYTES, OpenCalls, open_calls_path, read_open_calls
from nodes.protocol.records import CallRecord


def call(number: int, client_id: str = "") -> CallRecord:
    return CallRecord(request_id=f"c{number}", client_id=client_id, at=1.7e9, read_s=0.1)


def names(path: Path) -> set[str]:
    return {one.request_id for one in read_open_calls(path.read_bytes())}


@given(st.lists(st.integers(0, 7), max_size=40))
def test_what_is_open_is_read_and_nothing_else(turns: list[int]) -> None:
    # Each number opens its call or, if that is open, ends it.
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = open_calls_path(Path(folder), "g.a", 3)
        opened, slots = OpenCalls(path), dict[int, int]()
        for number in turns:
            if number in slots:
                opened.free(slots.pop(number))
            else:
                slots[number] = opened.put(call(number))
        assert not turns or names(path) == {f"c{number}" for number in slots}
        opened.close()
        assert not path.exists()


def test_a_full_file_and_names_that_are_too_long_leave_nothing(tmp_path: Path) -> None:
    path = open_calls_path(tmp_path, "g", 1)
    opened = OpenCalls(path)
    assert opened.put(call(0, "x" * SLOT_BYTES)) == NONE
    slots = [opened.put(call(number)) for number in range(NUM_SLOTS)]
    assert NONE not in slots
    assert len({*slots}) == NUM_SLOTS
    assert opened.put(call(-1)) == NONE
    opened.free(NONE)
    opened.free(slots[5])
    assert opened.put(call(-1)) == slots[5]
    assert len(names(path)) == NUM_SLOTS


def test_damage_costs_what_is_damaged(tmp_path: Path) -> None:
    path = open_calls_path(tmp_path, "g", 1)
    opened = OpenCalls(path)
    for number in range(4):
        opened.put(call(number))
    whole = path.read_bytes()
    at = whole.index(b'{"request_id":"c2"')
    assert {one.request_id for one in read_open_calls(whole[:at] + b"\xff" + whole[at + 1 :])} == {"c0", "c1", "c3"}
    # A length beyond the slot.
    assert len(read_open_calls(whole[: at - 4] + b"\xff" * 4 + whole[at:])) == 3
    for foreign in (b"", whole[:-1], b"x" * len(whole)):
        assert read_open_calls(foreign) == []


def test_without_room_calls_are_served_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    opened = OpenCalls(open_calls_path(tmp_path / "file", "g", 1))
    assert opened.put(call(0)) == NONE
    opened.free(NONE)
    opened.close()
    # Nor is the file of another one taken.
    path = open_calls_path(tmp_path, "g", 1)
    OpenCalls(path).put(call(0))
    assert OpenCalls(path).put(call(1)) == NONE
    assert names(path) == {"c0"}
