"""What the layers of a model attend to. A backend prepares one plan for each kind that its layers have.

A window of W lets a position see W positions including itself, as in transformers (`kv > q - W`); FlashInfer counts
those to its left, `window_left = W - 1` (`kv >= q - window_left`, `variants.cuh` of 0.6.13). Pages that have fallen
out of every window stay where they are: nothing is evicted, a sequence takes as much memory as without a window.
"""

from typing import Final, NamedTuple

from nodes.model_spec import ModelSpec


class AttentionKind(NamedTuple):
    """A position sees up to `window` positions, itself included (0: no limit), and none behind it unless `sees_all`."""

    window: int = 0
    sees_all: bool = False


FULL: Final = AttentionKind()


def kinds_of(spec: ModelSpec) -> tuple[AttentionKind, ...]:
    """The kinds of a model's layers."""
    return tuple(AttentionKind(window, spec.is_encoder) for window in spec.layer_windows)
