"""Token ids to hidden states, and hidden states to logits."""

import torch.nn.functional as F
from torch import Tensor

from nodes.worker.layers.linear import make_linear, padded_rows


class Embedding:
    """Looks up rows of `weight`, `[vocab, hidden]`, which may stay mapped from its file."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[rows]` ids to `[rows, hidden]`."""
        return self._weight.index_select(0, token_ids)


class LMHead:
    """Hidden states of the sampled rows to logits; a weight that is tied to the embedding is packed a second time."""

    def __init__(self, weight: Tensor, tile_rows: int = 0) -> None:
        self._linear = make_linear(weight, None, tile_rows)

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]`, any number of rows, to logits `[rows, vocab]` in the model's dtype."""
        num_rows = hidden.shape[0]
        padding = padded_rows(num_rows) - num_rows
        return self._linear(F.pad(hidden, (0, 0, 0, padding)) if padding else hidden)[:num_rows]
