"""Prefill in two parts that are then joined: new tokens over each other, and new tokens over the cached ones.

Softmax over a union of keys is the mean of the softmaxes over its parts, weighted by their sums of exponentials (Ye et
al. 2025, recursive attention; FlashInfer's `merge_state`). This is the plain torch form, the oracle of FlashInfer's.
Logarithms of sums are to base 2 here, as in FlashInfer (`cascade.cuh` of 0.6.13: "logsumexp values with base 2").
"""

import math

import torch
from torch import Tensor


def attend_part(q: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of `q` (`[rows, heads, dim]`) over `keys` and `values` (`[positions, kv_heads, dim]`), in float32.

    `causal`: row r sees only the positions up to r. Returns `[rows, heads, dim]` and the base 2 logarithms of the sums
    of exponentials, `[rows, heads]`; over no positions at all these are 0 and minus infinity.
    """
    num_rows, num_heads, dim = q.shape
    group = num_heads // keys.shape[1]
    grouped = q.float().view(num_rows, -1, group, dim)
    scores = torch.einsum("rhgd,phd->rhgp", grouped, keys.float()) * dim**-0.5
    if causal:
        positions = torch.arange(keys.shape[0], device=q.device)
        hidden = positions > torch.arange(num_rows, device=q.device).unsqueeze(1)
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.unsqueeze(-1)).exp()
    attended = torch.einsum("rhgp,phd->rhgd", weights, values.float())
    return attended.reshape(num_rows, num_heads, dim), sums.view(num_rows, num_heads) / math.log(2)


def merge(a: Tensor, sums_a: Tensor, b: Tensor, sums_b: Tensor) -> Tensor:
    """Attention over both parts, `[rows, heads, dim]`, from what `attend_part` returned for each.

    For every row and head at least one of the parts has seen a position.
    """
    highest = torch.maximum(sums_a, sums_b)
    share_a, share_b = torch.exp2(sums_a - highest).unsqueeze(-1), torch.exp2(sums_b - highest).unsqueeze(-1)
    return (a * share_a + b * share_b) / (share_a + share_b)
