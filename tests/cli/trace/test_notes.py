"""What schedulers noted has its place in a call's time: exact on the gateway's host, elsewhere by the ask."""

from pathlib import Path

from cli.trace.chrome import events
from cli.trace.notes import placed, read_notes
from cli.trace.text import detail
from mesh.address import Address
from mesh.runtime.trace_ring import Note, map_ring
from nodes.protocol.records import AttemptRecord, CallRecord, SampleRecord
from nodes.trace_notes import STEP, Noted, step_size, text_of

CALL = CallRecord(
    request_id="c", host="a", clock_s=100.0, total_s=9.0, num_samples=1,
    samples=[
        SampleRecord(
            request_id="c-0",
            attempts=[AttemptRecord(attempt=0, scheduler="s.b", submitted_s=1.0, accepted_s=1.5, first_s=3.0)],
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


def test_every_kind_has_words() -> None:
    for kind in Noted:
        assert not text_of(Note(0.0, kind, 1, 2, 3)).startswith("note ")
    assert text_of(Note(0.0, 999, 1, 2, 3)) == "note 999: 2, 3"
