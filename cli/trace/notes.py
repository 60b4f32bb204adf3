"""What the actors of a host noted of some requests, read from their trace rings, and its place in a call's time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from mesh.runtime.trace_ring import ActorTrace, Note, key_of, read_folder
from nodes.protocol.records import NOT_YET, ActorNotes, CallRecord, NotePart, StepPart
from nodes.trace_notes import BEGAN, COMPUTED_STEP, STEP, Noted, text_of

_MAX_NOTES: Final = 500
"""Of one actor: of a prompt of 100,000 tokens in chunks of 256, all."""
_MAX_STEPS: Final = 5
"""The longest ones: what made a stream pause is among them, if a step did."""
_RESOLUTION_S: Final = 0.001
"""Of the loop's clock, by which moments are noted: an answer that comes within it comes at once."""


_ARRIVALS: Final = (Noted.ARRIVED, Noted.ORDERED, Noted.OPENED)
"""The notes of an attempt that comes to an actor: the first number of each is the attempt's."""


class PlacedNote(NamedTuple):
    """A note `at_s` seconds from the call's arrival, within `error_s` (0: on the same clock)."""

    at_s: float
    error_s: float
    actor_id: str
    text: str


class _Window(NamedTuple):
    """When a host had something to do with some requests; `is_open`: no scheduler has let go of them."""

    first: float
    last: float
    is_open: bool


def read_notes(folder: Path, request_ids: list[str], host: str) -> list[ActorNotes]:
    """What the rings in `folder` have of these requests, actors in the order of their first notes."""
    names = {key_of(request_id): request_id for request_id in request_ids}
    traces = read_folder(folder, names)
    mine = [note for trace in traces for note in trace.notes]
    if not mine:
        return []
    # Of all actors together: a worker notes prompts alone, and its steps that draw come after that.
    is_open = not any(note.kind == Noted.LEFT for note in mine)
    window = _Window(min(note.at for note in mine), max(note.at for note in mine), is_open)
    found = [_of_actor(trace, names, window, host) for trace in traces if trace.notes]
    return sorted(found, key=lambda one: one.notes[0].at)


def _of_actor(trace: ActorTrace, names: dict[int, str], window: _Window, host: str) -> ActorNotes:
    mine = trace.notes[-_MAX_NOTES:]
    return ActorNotes(
        actor_id=trace.actor_id,
        epoch=trace.epoch,
        host=host,
        notes=[NotePart(at=note.at, request_id=names[note.key], text=text_of(note)) for note in mine],
        steps=_longest(trace.steps, window),
        arrived=[(names[note.key], note.a, note.at) for note in mine if note.kind in _ARRIVALS],
        num_lost=trace.num_lost,
    )


def _longest(steps: list[Note], window: _Window) -> list[StepPart]:
    """Only steps meanwhile: a long one of another hour explains nothing. One that never ended explains most."""
    begun: dict[int, Note] = {}
    ended: list[StepPart] = []
    for step in steps:
        if step.kind == BEGAN:
            begun[step.key] = step
        elif step.kind in (STEP, COMPUTED_STEP) and window.first <= step.at <= window.last:
            before = begun.pop(step.key, None)
            ended.append(_part(step, step.b / 1e6, NOT_YET if before is None else before.b / 1e6))
        else:
            begun.pop(step.key, None)
    # What began before the last step ended has ended as well: its end was written over, or is that of another epoch.
    last = max((step.at for step in steps if step.kind == COMPUTED_STEP), default=0.0)
    hangs = [
        _part(step, NOT_YET, step.b / 1e6)
        for step in begun.values()
        if step.at >= max(last, window.first) and (window.is_open or step.at <= window.last)
    ]
    longest = sorted(ended, key=lambda step: step.took_s)[-_MAX_STEPS:]
    return sorted([*longest, *hangs], key=lambda step: step.at)


def _part(step: Note, took_s: float, waited_s: float) -> StepPart:
    rows, tokens = step.a >> 20, step.a & 0xF_FFFF
    return StepPart(at=step.at, number=step.key, num_rows=rows, num_tokens=tokens, took_s=took_s, waited_s=waited_s)


def placed(call: CallRecord, actors: Iterable[ActorNotes]) -> list[PlacedNote]:
    """Notes and long steps in the call's time, of all actors whose clock can be told.

    Hosts' clocks are not compared: an attempt came to a scheduler between its submission and its answer, and to another
    actor before its first output, both on the gateway's clock. The shortest such time places all that its host noted,
    with an error of half of it.
    """
    actors = list(actors)
    offsets: dict[str, tuple[float, float]] = {}
    for actor in actors:
        for request_id, attempt, at in actor.arrived:
            came = _came(call, request_id, attempt, actor.actor_id)
            if came is not None:
                middle_s = (came[0] + came[1]) / 2
                error_s = max(came[1] - middle_s, _RESOLUTION_S)
                known = offsets.get(actor.host)
                if known is None or error_s < known[1]:
                    offsets[actor.host] = at - middle_s, error_s
    if call.clock_s:
        offsets[call.host] = call.clock_s, 0.0
    found: list[PlacedNote] = []
    for actor in actors:
        if actor.host in offsets:
            zero, error_s = offsets[actor.host]
            found += [PlacedNote(note.at - zero, error_s, actor.actor_id, note.text) for note in actor.notes]
            found += [PlacedNote(step.at - zero, error_s, actor.actor_id, _step_text(step)) for step in actor.steps]
    return sorted(found, key=lambda note: note.at_s)


def _came(call: CallRecord, request_id: str, attempt: int, actor_id: str) -> tuple[float, float] | None:
    """Between which moments of the call an attempt came to an actor; None if the gateway did not hear of it."""
    attempts = (one for sample in call.samples if sample.request_id == request_id for one in sample.attempts)
    for one in attempts:
        if one.attempt != attempt:
            continue
        if one.scheduler == actor_id and one.accepted_s >= 0:
            return one.submitted_s, one.accepted_s
        # Of a dead gateway's attempts nobody knows where they were sent, but whoever had one had it before its output.
        if one.first_s >= 0 and (actor_id in (one.prefill, one.detokenizer) or not one.scheduler):
            return one.submitted_s, one.first_s
    return None


def _step_text(step: StepPart) -> str:
    size = f"{step.num_rows} rows, {step.num_tokens} tokens"
    if step.waited_s < 0:
        return f"step {step.number} ends: {step.took_s * 1000:.1f} ms, {size}"
    line = f"after {step.waited_s * 1000:.1f} ms in line"
    if step.took_s < 0:
        return f"step {step.number} begins {line} and does not end: {size}"
    return f"step {step.number} is computed: {step.took_s * 1000:.1f} ms, {line}, {size}"
