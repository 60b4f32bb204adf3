"""What the actors of a host noted of some requests, read from their trace rings, and its place in a call's time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from mesh.runtime.trace_ring import ActorTrace, Note, key_of, read_folder
from nodes.protocol.records import ActorNotes, CallRecord, NotePart, StepPart
from nodes.trace_notes import STEP, Noted, text_of

_MAX_NOTES: Final = 500
"""Of one actor: of a prompt of 100,000 tokens in chunks of 256, all."""
_MAX_STEPS: Final = 5
"""The longest ones: what made a stream pause is among them, if a step did."""


class PlacedNote(NamedTuple):
    """A note `at_s` seconds from the call's arrival, within `error_s` (0: on the same clock)."""

    at_s: float
    error_s: float
    actor_id: str
    text: str


def read_notes(folder: Path, request_ids: list[str], host: str) -> list[ActorNotes]:
    """What the rings in `folder` have of these requests, actors in the order of their first notes."""
    names = {key_of(request_id): request_id for request_id in request_ids}
    found = [_of_actor(trace, names, host) for trace in read_folder(folder)]
    return sorted((one for one in found if one.notes), key=lambda one: one.notes[0].at)


def _of_actor(trace: ActorTrace, names: dict[int, str], host: str) -> ActorNotes:
    mine = [note for note in trace.notes if note.key in names][-_MAX_NOTES:]
    steps: list[Note] = []
    if mine:
        # Only steps during the request: a long one of another hour explains nothing.
        first, last = mine[0].at, mine[-1].at
        during = (step for step in trace.steps if step.kind == STEP and first <= step.at <= last)
        steps = sorted(sorted(during, key=lambda step: step.b)[-_MAX_STEPS:], key=lambda step: step.at)
    return ActorNotes(
        actor_id=trace.actor_id,
        epoch=trace.epoch,
        host=host,
        notes=[NotePart(at=note.at, request_id=names[note.key], text=text_of(note)) for note in mine],
        steps=[
            StepPart(
                at=step.at, number=step.key, num_rows=step.a >> 20, num_tokens=step.a & 0xF_FFFF, took_s=step.b / 1e6
            )
            for step in steps
        ],
        arrived=[(names[note.key], note.a, note.at) for note in mine if note.kind == Noted.ARRIVED],
        num_lost=trace.num_lost,
    )


def placed(call: CallRecord, actors: Iterable[ActorNotes]) -> list[PlacedNote]:
    """Notes and long steps in the call's time, of all actors whose clock can be told.

    Hosts' clocks are not compared: a scheduler took an attempt between its submission and its answer, both on the
    gateway's clock, which places all that its host noted with an error of half that time.
    """
    actors = list(actors)
    offsets = {call.host: (call.clock_s, 0.0)} if call.clock_s else {}
    for actor in actors:
        for request_id, attempt, at in actor.arrived:
            asked = _asked(call, request_id, attempt, actor)
            # The first attempt of each host is enough, and the gateway's own host needs none.
            if asked is not None and actor.host not in offsets:
                submitted_s, accepted_s = asked
                offsets[actor.host] = at - (submitted_s + accepted_s) / 2, (accepted_s - submitted_s) / 2
    found: list[PlacedNote] = []
    for actor in actors:
        if actor.host in offsets:
            zero, error_s = offsets[actor.host]
            found += [PlacedNote(note.at - zero, error_s, actor.actor_id, note.text) for note in actor.notes]
            found += [PlacedNote(step.at - zero, error_s, actor.actor_id, _step_text(step)) for step in actor.steps]
    return sorted(found, key=lambda note: note.at_s)


def _asked(call: CallRecord, request_id: str, attempt: int, actor: ActorNotes) -> tuple[float, float] | None:
    for sample in call.samples:
        for one in sample.attempts:
            is_it = (sample.request_id, one.attempt, one.scheduler) == (request_id, attempt, actor.actor_id)
            if is_it and one.accepted_s >= 0:
                return one.submitted_s, one.accepted_s
    return None


def _step_text(step: StepPart) -> str:
    return f"step {step.number} ends: {step.took_s * 1000:.1f} ms, {step.num_rows} rows, {step.num_tokens} tokens"
