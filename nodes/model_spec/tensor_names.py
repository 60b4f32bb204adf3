"""Which tensor of a checkpoint is which of a model: decided by the names in the files' headers alone. Pure.

So every process that reads a folder decides the same, before any weight is read.
"""

from collections.abc import Collection, Iterable
from typing import Final

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_BODIES: Final = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
"""What names of all tensors but the head begin with: of models of text, and of wrappers as they were published and as
transformers calls them since its release 4.52. Nothing: a model saved without its head.
"""
_HEADS: Final = (HEAD, "language_model.lm_head.weight")
_OF_EVERY_BODY: Final = "norm.weight"
_VISION: Final = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_COMPUTED: Final = ("rotary_emb.inv_freq",)


def stored_names(expected: Collection[str], found: Collection[str]) -> dict[str, str]:
    """The name in the files of each tensor that is `expected`; one that they lack is looked for by its own.

    A model whose head is not expected has a tied one: head or embedding, whichever is there, is then both. What comes
    behind a pooling lies outside of the body.
    """
    body = next((body for body in _BODIES if body + _OF_EVERY_BODY in found), _BODIES[0])
    head = next((head for head in _HEADS if head in found), HEAD)
    names = {name: body + name.removeprefix(_BODIES[0]) if name.startswith(_BODIES[0]) else name for name in expected}
    names |= {HEAD: head} if HEAD in names else {}
    if HEAD not in names and EMBEDDING in names and names[EMBEDDING] not in found and head in found:
        names[EMBEDDING] = head
    return names


def has_both(found: Collection[str]) -> bool:
    return all(name in found for name in stored_names((EMBEDDING, HEAD), found).values())


def has_head(found: Collection[str]) -> bool:
    return any(name in found for name in _HEADS)


def left_over(names: dict[str, str], found: Iterable[str]) -> list[str]:
    """What is stored but not one of the model's tensors, and is no part of what sees images, and not computed here."""
    used = frozenset(names.values())
    return [
        name for name in found if name not in used and not name.startswith(_VISION) and not name.endswith(_COMPUTED)
    ]
