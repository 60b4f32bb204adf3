"""Planted bugs in what a worker knows of sequences and in what a scheduler believes the worker knows.

Each rule of the table has a guard behind it, so some of these break the guard too: alone they would fail unseen.
"""

from typing import Any

from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.scheduler.batch.running import Running
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.worker.core import WorkerCore
from nodes.worker.steps.columns import Columns
from nodes.worker.steps.sequence_table import OpenSequence, SequenceTable
from tests.simulation.planting import Bug, around, bug


def _leave_the_slot_at_once(leave: Any, self: Running, sequence: Any, stage: Any) -> bool:
    """The next sequence may have it, though what is in flight still names it."""
    if sequence.num_inflight and sequence.slot >= 0 and sequence.row_id not in self._leaving:
        self.slots.give_back(sequence.slot)
        # When what is in flight ends, the slot must not be given back once more.
        self.slots.__dict__.setdefault("early", set()).add(sequence.row_id)
    return leave(self, sequence, stage)


def _give_back_once(give_back: Any, self: Running, sequence: Any) -> None:
    early = self.slots.__dict__.get("early", set())
    if sequence.row_id in early:
        early.discard(sequence.row_id)
        sequence.slot = -1
    give_back(self, sequence)


def _nobody(slot: int) -> OpenSequence:
    return OpenSequence(Open(slot, -1, 0, Sampling()))


def _record_for_anybody(_: Any, self: SequenceTable, columns: Columns, token_ids: Any) -> None:
    rows = zip(columns.slots, columns.starts, columns.counts, token_ids, strict=False)
    for slot, start, count, token_id in rows:
        if token_id >= 0:
            one = self._slots.setdefault(slot, _nobody(slot))
            one.drawn, one.drawn_at = token_id, start + count


def _record_of_every_epoch(end: Any, self: WorkerCore, event: Any) -> Any:
    running, commands = self._running[0], end(self, event)
    if running.plan.scheduler_epoch != self._epoch:
        token_ids = [-1] * running.num_rows
        for row, token_id in zip(running.runnable.rows, event.outcome.token_ids, strict=True):
            token_ids[row.row] = token_id
        self._table.record(running.columns, token_ids)
    return commands


def _append_pages(apply: Any, self: SequenceTable, opens: Any, columns: Columns) -> Any:
    """Pages of a sequence that is opened again are put behind those that it had."""
    before = {one.slot: self._slots.get(one.slot, _nobody(one.slot)) for one in opens}
    again = {one.slot: before[one.slot] for one in opens if before[one.slot].sequence == one.sequence}
    found = apply(self, opens, columns)
    for slot, had in again.items():
        self._slots[slot].pages[: len(had.pages)] = had.pages
    return found


def _run_all_the_same(apply: Any, self: SequenceTable, opens: Any, columns: Columns) -> Any:
    if isinstance(found := apply(self, opens, columns), list):
        return found
    for at, slot in enumerate(columns.slots):
        one = self._slots.setdefault(slot, _nobody(slot))
        one.sequence, one.drawn_at, one.drawn = columns.sequences[at], columns.starts[at], max(one.drawn, 0)
        one.pages.extend([0] * (columns.first_pages[at] - len(one.pages)))
    return apply(self, opens, columns)


def _trust_a_free_slot(opened: Any, self: SequenceTable, opening: Any) -> OpenSequence:
    """Keep what was drawn for it: nothing was, or it would not be free."""
    one, before = opened(self, opening), self._slots.get(opening.slot)
    if before is not None and before.sequence == -1:
        one.drawn, one.drawn_at = before.drawn, before.drawn_at
    return one


def _believe_in_the_same_table(on_adopted: Any, self: Pipeline, adopted: Any, now: float) -> Any:
    self.table = max(0, self.table - 1)
    return on_adopted(self, adopted, now)


NOT_OPENED_AGAIN = around(Pipeline, "on_adopted", _believe_in_the_same_table)


def _never_emptied(clear: Any, self: Any) -> Any:
    return None if hasattr(self, "_slots") else clear(self)


TABLE_KEPT = around(SequenceTable, "clear", _never_emptied)

OPENINGS_PLANTED: dict[str, Bug] = {
    "sequences are not opened again after an adoption": bug(26, NOT_OPENED_AGAIN),
    "a step that does not match is run": bug(7, NOT_OPENED_AGAIN, around(SequenceTable, "apply", _run_all_the_same)),
    "pages are appended, not placed": bug(13, around(SequenceTable, "apply", _append_pages)),
}
"""Seen by the scenarios of `scenario.py`."""

PLANTED: dict[str, Bug] = {
    "a worker's table is kept over epochs": bug(9, TABLE_KEPT),
    "a slot is used while it is in flight": bug(
        1,
        around(Running, "leave", _leave_the_slot_at_once),
        around(Running, "_give_back_slot", _give_back_once),
        around(SequenceTable, "record", _record_for_anybody),
    ),
    "a late draw is recorded": bug(
        7,
        around(WorkerCore, "_end", _record_of_every_epoch),
        around(SequenceTable, "record", _record_for_anybody),
        around(SequenceTable, "_opened", _trust_a_free_slot),
    ),
}
"""Seen by the scenarios of `tables.py`."""
