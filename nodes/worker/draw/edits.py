"""What requests change about their rows' logits, gathered before there are any. Needs neither torch nor numpy."""

from collections.abc import Iterable
from itertools import chain
from itertools import count as count_up
from typing import TYPE_CHECKING, Final

from nodes.asks.edits import RowEdits
from nodes.protocol import RowError
from nodes.request import Sampling
from nodes.worker.steps.step import RunnableRow

if TYPE_CHECKING:
    from array import array

EDITOR_FAILED: Final = "editor_failed"
LEFT_NOTHING: Final = "what the request asks of its tokens leaves none that could be drawn"


def edits_of(row: RunnableRow) -> RowEdits | RowError | None:
    """The edits of a row that draws; None if there are none. RowError: one of its editors has raised."""
    sequence = row.sequence
    if not sequence.is_edited:
        return None
    edits = sampling_edits(sequence.sampling, row.output_position, row.history) or RowEdits()
    try:
        for editor in sequence.editors:
            assert row.history is not None, "a sequence with editors keeps its tokens"
            editor.edit(row.history, sequence.num_prompt_tokens, edits)
    except (KeyboardInterrupt, SystemExit):
        raise
    # Whatever one request provokes must not end the batch; a panic of an extension is no Exception.
    except BaseException as error:  # noqa: BLE001
        return RowError(row.row, EDITOR_FAILED, f"{type(error).__name__}: {error}"[:500])
    return edits if _is_any(edits) else None


def sampling_edits(sampling: Sampling, position: int, history: "array[int] | None") -> RowEdits | None:
    """What `sampling` alone changes at an output position after `history`, which is needed only if it looks back."""
    edits = RowEdits()
    if sampling.masked_token_ids and position < sampling.min_tokens:
        edits.floor.update(sampling.masked_token_ids)
    if sampling.logit_bias:
        edits.bias.update(sampling.logit_bias)
    if sampling.looks_back and history:
        edits.scale = dict.fromkeys(history, sampling.repetition_penalty)
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
