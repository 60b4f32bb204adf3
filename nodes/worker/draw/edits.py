"""What requests change about their rows' logits, gathered before there are any. Needs neither torch nor numpy."""

from array import array
from collections.abc import Iterable
from itertools import chain
from itertools import count as count_up
from typing import Final

from nodes.asks.edits import EditFailed, RowEdits
from nodes.protocol import RowError
from nodes.protocol.attempts import UNSUPPORTED_ASK
from nodes.worker.steps.step import RunnableRow

EDITOR_FAILED: Final = "editor_failed"
NOTHING_LEFT: Final = "nothing_left"
LEFT_NOTHING: Final = "what the request asks of its tokens leaves none that could be drawn"
_SHOWN_CHARS: Final = 500
"""An error goes with a step's result, and may quote what the request asks for."""

_NO_HISTORY: Final = array("i")


def edits_of(row: RunnableRow) -> RowEdits | RowError | None:
    """The edits of a row that draws; None if there are none. RowError: one of its editors has raised."""
    sequence = row.sequence
    if not sequence.is_edited:
        return None
    if sequence.problem:
        return RowError(row.row, UNSUPPORTED_ASK, sequence.problem)
    edits = RowEdits()
    history = _NO_HISTORY if row.history is None else row.history
    try:
        for editor in sequence.editors:
            editor.edit(history, row.output_position, edits)
    except EditFailed as error:
        return RowError(row.row, error.code, error.message[:_SHOWN_CHARS], retryable=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    # Whatever one request provokes must not end the batch; a panic of an extension is no Exception.
    except BaseException as error:  # noqa: BLE001
        return RowError(row.row, EDITOR_FAILED, f"{type(error).__name__}: {error}"[:_SHOWN_CHARS], retryable=False)
    return edits if _is_any(edits) else None


def first_allowed(wanted: Iterable[int], edits: RowEdits) -> int:
    """The first of `wanted` that mask and floor allow; if there is none, the lowest id; -1: nothing is allowed."""
    mask = None if edits.mask is None else memoryview(edits.mask).cast("B")
    every = count_up() if mask is None else range(8 * len(mask))
    for token in chain(wanted, every):
        is_in = mask is None or (token in every and mask[token >> 3] >> (token & 7) & 1)
        if is_in and token not in edits.floor:
            return token
    return -1


def _is_any(edits: RowEdits) -> bool:
    return edits.mask is not None or bool(edits.floor or edits.bias or edits.scale or edits.add)
