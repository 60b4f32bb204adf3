"""Which tensor of a checkpoint is which of a model: decided by the names in the files' headers alone. Pure.

So every process that reads a folder decides the same, before any weight is read.
"""

from collections.abc import Collection, Iterable
from typing import Final

from nodes.models.registry import ENCODER_BODIES

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_BODIES: Final = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
"""What names of all tensors but the head begin with: of models of text, and of wrappers as they were published and as
transformers calls them since its release 4.52. Nothing: a model saved without its head.
"""
_HEADS: Final = (HEAD, "language_model.lm_head.weight")
_OF_EVERY_BODY: Final = "norm.weight"
_VISION: Final = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_COMPUTED: Final = ("rotary_emb.inv_freq", "embeddings.position_ids", "embeddings.token_type_ids")
_UNUSED: Final = ("cls.", "pooler.", "lm_head.")
"""Heads of encoders that no vector is made of, unless a pooling names them; the second one belongs to the body."""
_OLD: Final = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""As files say that were written from TensorFlow's; transformers reads both."""


def stored_names(expected: Collection[str], found: Collection[str]) -> dict[str, str]:
    """The name in the files of each tensor that is `expected`; one that they lack is looked for by its own.

    A model whose head is not expected has a tied one: head or embedding, whichever is there, is then both. What comes
    behind a pooling lies outside of the body.
    """
    if own := _encoder_body(expected):
        return _stored_in_encoder(own, expected, found)
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
    used, own = frozenset(names.values()), _encoder_body(names)
    others = (*_UNUSED, *(own + name for name in _UNUSED)) if own else _VISION
    return [name for name in found if name not in used and not name.startswith(others) and not name.endswith(_COMPUTED)]


def _encoder_body(expected: Iterable[str]) -> str:
    """What the names of an encoder's tensors begin with; empty for other models."""
    return next((body for name in expected for body in ENCODER_BODIES if name.startswith(body)), "")


def _stored_in_encoder(own: str, expected: Collection[str], found: Collection[str]) -> dict[str, str]:
    """An encoder saved without any head has names without its body's."""
    body = own if any(name.startswith(own) for name in found) else ""
    names = {name: body + name.removeprefix(own) if name.startswith(own) else name for name in expected}
    for name, stored in names.items():
        end = next((end for end in _OLD if stored.endswith(end)), "")
        if end and stored not in found and (older := stored.removesuffix(end) + _OLD[end]) in found:
            names[name] = older
    return names
