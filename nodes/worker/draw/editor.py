"""The interface of what changes a row's logits."""

from typing import TYPE_CHECKING, Protocol

from nodes.asks.edits import RowEdits

if TYPE_CHECKING:
    from array import array


class Editor(Protocol):
    """One thing that a request asks of its tokens. Made when its sequence is opened, used in the runner's thread alone.

    A pure function of `history`, whatever it keeps to be fast: asked twice, or for an earlier position, it answers the
    same, because steps are sent again.
    """

    def edit(self, history: "array[int]", num_prompt: int, edits: RowEdits) -> None:
        """Change `edits` for the token after `history`, of which the first `num_prompt` are the prompt. May raise."""
        ...
