"""What an actor did outlives it, whole records only, and a bounded number of them."""

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address
from mesh.runtime.trace_ring import (
    KEPT_INCARNATIONS,
    MAX_FILES,
    UNMAPPED,
    Note,
    TraceRing,
    key_of,
    map_ring,
    read_folder,
    read_trace,
)

ME = Address("scheduler-decode-0.a", 7)


def test_what_was_noted_is_read_in_order_and_the_oldest_is_lost() -> None:
    clock = iter(range(10_000))
    ring = TraceRing(lambda: float(next(clock)))
    for number in range(UNMAPPED + 10):
        ring.note(3, f"r{number}", number, 2**32 + 1)
    ring.step(1, 99, 5, 6)
    trace = read_trace(ring.content, ME.actor_id)
    assert trace is not None
    assert (trace.actor_id, trace.num_lost) == (ME.actor_id, 10)
    assert trace.notes[0] == Note(10.0, 3, key_of("r10"), 10, 1)
    assert [note.a for note in trace.notes] == list(range(10, UNMAPPED + 10))
    assert trace.steps == [Note(float(UNMAPPED + 10), 1, 99, 5, 6)]


def test_an_actor_that_was_killed_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    if (pid := os.fork()) == 0:
        ring = map_ring(folder, ME, time.monotonic)
        number = 0
        while True:
            number += 1
            ring.note(1, "r", number, number)
    while not [trace for trace in read_folder(folder) if len(trace.notes) > 100]:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (trace,) = read_folder(folder)
    numbers = [note.a for note in trace.notes]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "none is missing but what was lost"
    assert all(note.a == note.b for note in trace.notes), "no record is half of one and half of another"
    assert (folder / "scheduler-decode-0.a.7").stat().st_mode & 0o777 == 0o600


def test_files_are_bounded_and_those_of_an_actor_most_of_all(tmp_path: Path) -> None:
    for epoch in range(KEPT_INCARNATIONS + 3):
        map_ring(tmp_path, Address("a", epoch), time.monotonic).note(1, "r")
    assert [trace.epoch for trace in read_folder(tmp_path)] == [3, 4, 5]
    for number in range(MAX_FILES):
        (tmp_path / f"other-{number}.1").write_bytes(b"")
    map_ring(tmp_path, Address("b", 1), time.monotonic).note(1, "r")
    assert len(list(tmp_path.iterdir())) == MAX_FILES


def test_where_there_is_no_room_it_goes_on_unseen() -> None:
    ring = map_ring(Path("/proc/nowhere"), ME, time.monotonic)
    ring.note(1, "r")
    trace = read_trace(ring.content, ME.actor_id)
    assert trace is not None
    assert len(trace.notes) == 1


@given(st.data())
def test_damaged_files_give_only_records_that_were_written(data: st.DataObject) -> None:
    ring = TraceRing(lambda: 1.0)
    for number in range(data.draw(st.integers(0, 2 * UNMAPPED))):
        ring.note(1, "r", number, number)
    content = bytearray(ring.content)
    for _ in range(data.draw(st.integers(0, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    found = read_trace(bytes(content[: data.draw(st.integers(0, len(content)))]), "a")
    assert found is None or len(found.notes) <= len(content) // 32


def test_an_actor_that_notes_nothing_has_no_file(tmp_path: Path) -> None:
    ring = map_ring(tmp_path / "trace", ME, time.monotonic)
    assert not list(tmp_path.iterdir())
    ring.step(1, 1, 1, 1)
    assert len(read_folder(tmp_path / "trace")) == 1


@pytest.mark.parametrize("content", [b"", b"kvtrace1", b"kvtrace2" + bytes(1000), b"kvtrace1\x02\x00" + bytes(1000)])
def test_what_is_no_trace_is_none(content: bytes) -> None:
    assert read_trace(content, "a") is None
