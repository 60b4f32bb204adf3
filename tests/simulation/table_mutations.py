"""Planted bugs in what a worker knows of sequences and in what a scheduler believes that it knows.

Each rule of the table has a guard behind it, so some of these break the guard too: alone they would fail unseen.
"""

from typing import Any

import numpy as np

from nodes.scheduler.batch.running import Running
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.worker.core import WorkerCore
from nodes.worker.steps.columns import Columns
from nodes.worker.steps.sequence_table import SequenceTable
from tests.simulation.planting import Patches, around


def _leave_the_slot_at_once(leave: Any) -> Any:
    def mutated(self: Running, sequence: Any, stage: Any) -> bool:
        """Whoever comes next may have it; what is in flight still names it."""
        if sequence.num_inflight and sequence.slot >= 0 and sequence.row_id not in self._leaving:
            self.slots.give_back(sequence.slot)
            # The end of what is in flight gives it back again, to nobody.
            self.slots.__dict__.setdefault("early", set()).add(sequence.row_id)
        return leave(self, sequence, stage)

    return mutated


def _give_back_once(give_back: Any) -> Any:
    def mutated(self: Running, sequence: Any) -> None:
        early = self.slots.__dict__.get("early", set())
        if sequence.row_id in early:
            early.discard(sequence.row_id)
            sequence.slot = -1
        give_back(self, sequence)

    return mutated


def _record_for_anybody(_: Any) -> Any:
    def mutated(self: SequenceTable, draws: Any, token_ids: Any) -> None:
        drawn = np.array(token_ids, np.int32)[draws.rows]
        is_there = (drawn >= 0) & (draws.slots < len(self._owner))
        self._drawn[draws.slots[is_there]] = drawn[is_there]
        self._drawn_at[draws.slots[is_there]] = draws.positions[is_there]

    return mutated


def _record_of_every_epoch(end: Any) -> Any:
    def mutated(self: WorkerCore, event: Any) -> Any:
        running, commands = self._running[0], end(self, event)
        if running.draws is not None and running.plan.scheduler_epoch != self._epoch:
            token_ids = [-1] * running.num_rows
            for row, token_id in zip(running.runnable.rows, event.outcome.token_ids, strict=True):
                token_ids[row.row] = token_id
            self._table.record(running.draws, token_ids)
        return commands

    return mutated


def _append_pages(apply: Any) -> Any:
    def mutated(self: SequenceTable, opens: Any, columns: Columns) -> str:
        """Those of a sequence that is opened again come behind those that it had."""
        again = {one.slot for one in opens if one.slot < len(self._owner) and self._owner[one.slot] == one.sequence}
        had = {slot: self._pages[slot, : self._num_pages[slot]].copy() for slot in again}
        problem = apply(self, opens, columns)
        for slot, pages in had.items():
            self._pages[slot, : len(pages)] = pages
        return problem

    return mutated


def _run_all_the_same(apply: Any) -> Any:
    def mutated(self: SequenceTable, opens: Any, columns: Columns) -> str:
        if apply(self, opens, columns):
            self._owner[columns.slots] = columns.sequences
            self._num_pages[columns.slots] = np.maximum(self._num_pages[columns.slots], columns.first_pages)
            self._drawn_at[columns.slots] = columns.starts
            self._drawn[columns.slots] = np.maximum(self._drawn[columns.slots], 0)
            return apply(self, opens, columns)
        return ""

    return mutated


def _trust_a_free_slot(open_one: Any) -> Any:
    def mutated(self: SequenceTable, one: Any) -> None:
        """Nothing was drawn for it, or it would not be free."""
        drawn_at, is_free = self._drawn_at[one.slot], self._owner[one.slot] == -1
        open_one(self, one)
        if is_free:
            self._drawn_at[one.slot] = drawn_at

    return mutated


def _believe_in_the_same_table(on_adopted: Any) -> Any:
    def mutated(self: Pipeline, adopted: Any, now: float) -> Any:
        self.table = max(0, self.table - 1)
        return on_adopted(self, adopted, now)

    return mutated


NOT_OPENED_AGAIN = around(Pipeline, "on_adopted", _believe_in_the_same_table)


def _never_emptied(clear: Any) -> Any:
    return lambda self: None if hasattr(self, "_owner") else clear(self)


TABLE_KEPT = around(SequenceTable, "clear", _never_emptied)

OPENINGS_PLANTED: dict[str, Patches] = {
    "sequences are not opened again after an adoption": [NOT_OPENED_AGAIN],
    "a step that does not match is run": [NOT_OPENED_AGAIN, around(SequenceTable, "apply", _run_all_the_same)],
    "pages are appended, not placed": [around(SequenceTable, "apply", _append_pages)],
}
"""Seen by the scenarios of everything."""

PLANTED: dict[str, Patches] = {
    "a worker's table is kept over epochs": [TABLE_KEPT],
    "a slot is used while it is in flight": [
        around(Running, "leave", _leave_the_slot_at_once),
        around(Running, "_give_back_slot", _give_back_once),
        around(SequenceTable, "record", _record_for_anybody),
    ],
    "a late draw is recorded": [
        around(WorkerCore, "_end", _record_of_every_epoch),
        around(SequenceTable, "record", _record_for_anybody),
        around(SequenceTable, "_open", _trust_a_free_slot),
    ],
}
"""Seen by those of `tables.py`."""
