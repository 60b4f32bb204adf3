"""A mixture of experts (Shazeer et al. 2017): each row goes through the few that the router's softmax ranks highest."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from nodes.models.parts import Experts


def mixture(x: Tensor, scores: Tensor, by: Experts, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum of experts for each row of `x`, float32 `[rows, hidden]`; `scores` are the router's.

    `expert` computes the rows of one expert. A row's experts are added up in the order of their numbers, so that its
    bits do not depend on the rows beside it.
    """
    shares = torch.softmax(scores.float(), -1)
    # Stable: of experts with equal shares the first are taken, on every device.
    chosen, experts = torch.sort(shares, dim=-1, descending=True, stable=True)
    chosen, experts = chosen[:, : by.top_k], experts[:, : by.top_k]
    if by.normalized:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    # Rounded as in training.
    chosen = chosen.to(x.dtype).float()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in cast("list[int]", experts.unique().tolist()):
        rows, places = (experts == number).nonzero(as_tuple=True)
        result = expert(number, x.index_select(0, rows)).float()
        total.index_add_(0, rows, result * chosen[rows, places].unsqueeze(1))
    return total
