"""Which tensor of a checkpoint is which of a model: decided by the names in the files' headers alone. Pure.

So every process that reads a folder decides the same, before any weight is read.
"""

from collections.abc import Collection, Iterable
from typing import Final

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_MEANINGLESS: Final = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that are computed here."""


def stored_names(expected: Collection[str], found: Collection[str]) -> dict[str, str]:
    """The name in the files of each tensor that is `expected`; one that they lack keeps its own.

    A model whose head is not expected has a tied one: head or embedding, whichever is there, is then both.
    """
    names = {name: name for name in expected}
    if HEAD not in names and EMBEDDING not in found and HEAD in found:
        names[EMBEDDING] = HEAD
    return names


def has_both(found: Collection[str]) -> bool:
    """Whether a head is stored beside the embedding."""
    return EMBEDDING in found and HEAD in found


def left_over(names: dict[str, str], found: Iterable[str]) -> list[str]:
    """What is stored but not one of the model's tensors, and means something."""
    used = frozenset(names.values())
    return [name for name in found if name not in used and not name.endswith(_MEANINGLESS)]
