"""What actors noted has its place in a call's time: exact on the gateway's host, elsewhere by the ask."""

from pathlib import Path

import msgspec
import pytest

from cli.trace.chrome import events
from cli.trace.notes import placed, read_notes
from cli.trace.text import detail
from mesh.address import Address
from mesh.runtime.trace_ring import Note, key_of, map_ring
from nodes.protocol.records import AttemptRecord, CallRecord, SampleRecord
from nodes.trace_notes import BEGAN, COMPUTED_STEP, STEP, Noted, step_size, text_of

CALL = CallRecord(
    request_id="c", host="a", clock_s=100.0, total_s=9.0, num_samples=1,
    samples=[
        SampleRecord(
            request_id="c-0",
            attempts=[
                AttemptRecord(
                    attempt=0, scheduler="s.b", prefill="p.e", detokenizer="t.d", submitted_s=1.0, accepted_s=1.5,
                    first_s=3.0,
                )
            ],
        )
    ],
)  # fmt: skip


def noted(folder: Path, actor_id: str, clock: list[float]) -> None:
    ring = map_ring(folder, Address(actor_id, 1), lambda: clock.pop(0))
    ring.note(Noted.ARRIVED, "c-0", 0, 40)
    ring.note(Noted.ARRIVED, "another", 0, 40)
    ring.step(STEP, 7, step_size(3, 500), 250_000)
    ring.note(Noted.CHUNK, "c-0", 0, 40)


def test_notes_of_a_request_and_the_long_steps_meanwhile(tmp_path: Path) -> None:
    noted(tmp_path, "s.b", [5.25, 5.3, 5.5, 6.25])
    (actor,) = read_notes(tmp_path, ["c-0"], "b")
    assert [note.text for note in actor.notes] == [
        "attempt 0 arrives, 40 tokens",
        "a chunk leaves in a step: tokens 0 to 40",
    ]
    there = [(round(note.at_s, 3), note.error_s, note.text) for note in placed(CALL, [actor])]
    # Taken between 1.0 and 1.5 of the call, so at 1.25, give or take 0.25.
    assert there == [
        (1.25, 0.25, "attempt 0 arrives, 40 tokens"),
        (1.5, 0.25, "step 7 ends: 250.0 ms, 3 rows, 500 tokens"),
        (2.25, 0.25, "a chunk leaves in a step: tokens 0 to 40"),
    ]
    assert "times of other hosts within 250.0 ms" in detail(CALL, [actor])[0]
    assert read_notes(tmp_path, ["c-1"], "b") == []
    (mark, *_) = [one for one in events([CALL], placed(CALL, [actor]))["traceEvents"] if one.get("tid") == "s.b"]
    assert mark["ts"] == 1.25e6


def test_on_the_gateway_s_host_no_clock_has_to_be_guessed(tmp_path: Path) -> None:
    noted(tmp_path, "x.a", [101.125, 101.2, 101.3, 102.0])
    here = read_notes(tmp_path, ["c-0"], "a")
    assert next((note.at_s, note.error_s) for note in placed(CALL, here)) == (1.125, 0.0)
    assert detail(CALL, here)[0] == "  noted:"


def test_a_host_whose_clock_nothing_tells_is_left_out(tmp_path: Path) -> None:
    noted(tmp_path, "p.c", [5.25, 5.3, 5.5, 6.25])
    assert placed(CALL, read_notes(tmp_path, ["c-0"], "c")) == []
    assert detail(CALL, []) == ["  nothing is noted of it any more"]


@pytest.mark.parametrize(("actor_id", "kind"), [("t.d", Noted.OPENED), ("p.e", Noted.ORDERED)])
def test_hosts_of_what_comes_after_the_answer_are_placed_by_the_first_output(
    tmp_path: Path, actor_id: str, kind: Noted
) -> None:
    ring = map_ring(tmp_path, Address(actor_id, 1), lambda: 55.0)
    ring.note(kind, "c-0", 0, 3)
    found = read_notes(tmp_path, ["c-0"], "d")
    assert [(note.at_s, note.error_s) for note in placed(CALL, found)] == [(2.0, 1.0)]
    # A scheduler of the same host was asked and answered in less time, which places both better.
    noted(tmp_path, "s.b", [54.0, 54.1, 54.2, 54.3])
    found = read_notes(tmp_path, ["c-0"], "d")
    assert [(note.at_s, note.error_s) for note in placed(CALL, found)][-1] == (2.25, 0.25)


def test_hosts_of_a_dead_gateway_s_attempts_are_placed_by_the_first_output(tmp_path: Path) -> None:
    attempt = msgspec.structs.replace(CALL.samples[0].attempts[0], scheduler="", prefill="", detokenizer="")
    sample = msgspec.structs.replace(CALL.samples[0], attempts=[attempt])
    noted(tmp_path, "s.b", [5.0, 5.1, 5.2, 5.3])
    (first, *_) = placed(msgspec.structs.replace(CALL, samples=[sample]), read_notes(tmp_path, ["c-0"], "b"))
    assert (first.at_s, first.error_s) == ((attempt.submitted_s + attempt.first_s) / 2, 1.0)
    waiting = msgspec.structs.replace(attempt, first_s=-1.0)
    sample = msgspec.structs.replace(sample, attempts=[waiting])
    assert placed(msgspec.structs.replace(CALL, samples=[sample]), read_notes(tmp_path, ["c-0"], "b")) == []


def worked(folder: Path, *steps: tuple[float, int, int, int], let_go_at: float = 0.0) -> None:
    """A worker's ring: when, kind, step, µs. It noted the request's prompt at 5 s, its scheduler its end."""
    clock = [5.0, *(at for at, *_ in steps)]
    ring = map_ring(folder, Address("w.b", 1), lambda: clock.pop(0))
    ring.note(Noted.KNOWN, "c-0", 1, 40)
    for _, kind, number, microseconds in steps:
        ring.step(kind, number, step_size(2, 2), microseconds)
    if let_go_at:
        map_ring(folder, Address("s.b", 1), lambda: let_go_at).note(Noted.LEFT, "c-0", 41)


def steps_of(folder: Path) -> list[tuple[int, float, float]]:
    (worker,) = [one for one in read_notes(folder, ["c-0"], "b") if one.actor_id == "w.b"]
    return [(step.number, step.took_s, step.waited_s) for step in worker.steps]


def test_a_worker_s_steps_after_its_last_note_of_the_request(tmp_path: Path) -> None:
    steps = [(5.1, BEGAN, 1, 2000), (5.2, COMPUTED_STEP, 1, 100_000), (9.0, BEGAN, 2, 0), (9.1, COMPUTED_STEP, 2, 9)]
    worked(tmp_path, *steps, let_go_at=6.0)
    # The second one came after its scheduler had let go of it.
    assert steps_of(tmp_path) == [(1, 0.1, 0.002)]


def test_a_step_in_which_the_worker_was_killed(tmp_path: Path) -> None:
    worked(tmp_path, (5.1, BEGAN, 1, 0), (5.2, COMPUTED_STEP, 1, 100_000), (5.3, BEGAN, 2, 1000))
    assert steps_of(tmp_path) == [(2, -1.0, 0.001)]
    call = msgspec.structs.replace(CALL, host="b", clock_s=4.0)
    (line,) = [one.text for one in placed(call, read_notes(tmp_path, ["c-0"], "b")) if "step 2" in one.text]
    assert line == "step 2 begins after 1.0 ms in line and does not end: 2 rows, 2 tokens"


def test_a_step_in_which_it_was_killed_after_the_request_had_ended(tmp_path: Path) -> None:
    worked(tmp_path, (7.0, BEGAN, 2, 1000), let_go_at=6.0)
    assert steps_of(tmp_path) == []


def test_a_step_whose_end_was_written_over_does_not_hang(tmp_path: Path) -> None:
    worked(tmp_path, (5.1, BEGAN, 1, 0), (5.3, BEGAN, 2, 0), (5.4, COMPUTED_STEP, 2, 9), let_go_at=6.0)
    assert [number for number, *_ in steps_of(tmp_path)] == [2]


def test_every_kind_has_words() -> None:
    for kind in Noted:
        assert not text_of(Note(0.0, kind, 1, 2, 3)).startswith("note ")
    assert text_of(Note(0.0, Noted.FAILED, 1, 2, key_of("source_lost"))) == (
        "the transfer failed (source_lost), 2 pages are in"
    )
    assert text_of(Note(0.0, Noted.COPIED, 1, 2, 0xAB)) == "the copy ends: 2 bytes over name 000000ab"
    assert text_of(Note(0.0, 999, 1, 2, 3)) == "note 999: 2, 3"


def test_an_answer_within_the_clocks_resolution_is_not_of_the_same_clock(tmp_path: Path) -> None:
    attempt = msgspec.structs.replace(CALL.samples[0].attempts[0], accepted_s=1.0)
    sample = msgspec.structs.replace(CALL.samples[0], attempts=[attempt])
    noted(tmp_path, "s.b", [5.0, 5.1, 5.2, 5.3])
    (first, *_) = placed(msgspec.structs.replace(CALL, samples=[sample]), read_notes(tmp_path, ["c-0"], "b"))
    assert (first.at_s, first.error_s) == (1.0, 0.001)
