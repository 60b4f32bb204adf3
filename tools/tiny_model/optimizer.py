"""Muon for the matrices of `tiny`, AdamW for the rest.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
matrix by the nearest orthogonal matrix, found by five Newton-Schulz steps. On this model it needs
about half the steps of AdamW. Called by the training script.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
NUM_NEWTON_SCHULZ_STEPS: Final = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of ``matrices[count, rows, columns]`` near 1; rows <= columns."""
    a, b, c = NEWTON_SCHULZ
    x = torch.nn.functional.normalize(matrices.flatten(1), eps=1e-7).view_as(matrices).bfloat16()
    for _ in range(NUM_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class Muon:
    """Muon with Nesterov momentum over matrices; those of one size are stepped together."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.momentum = momentum
        self.decay = decay
        self._by_size: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        self._velocity: dict[nn.Parameter, Tensor] = {}
        for matrix in matrices:
            rows, columns = matrix.shape
            self._by_size[min(rows, columns), max(rows, columns)].append(matrix)
            self._velocity[matrix] = torch.zeros_like(matrix)

    @property
    def state(self) -> list[Tensor]:
        """The momenta, one for each matrix; to be saved, and written over when a run goes on."""
        return list(self._velocity.values())

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every matrix against its gradient."""
        for group in self._by_size.values():
            updates: list[Tensor] = []
            for matrix in group:
                gradient = matrix.grad
                assert gradient is not None
                velocity = self._velocity[matrix]
                velocity.lerp_(gradient, 1 - self.momentum)
                update = gradient.lerp(velocity, self.momentum)
                updates.append(update if update.shape[0] <= update.shape[1] else update.mT)
            for matrix, update in zip(group, orthogonalise(torch.stack(updates)), strict=True):
                rows, columns = matrix.shape
                scale = max(1.0, rows / columns) ** 0.5
                matrix.mul_(1 - learning_rate * self.decay)
                matrix.add_(update if rows <= columns else update.mT, alpha=-learning_rate * scale)


class Optimizer:
    """Muon on the layers' matrices, AdamW on the embedding and the norms."""

    def __init__(self, network: nn.Module, matrix_rate: float = 0.02, other_rate: float = 0.004) -> None:
        named = list(network.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.matrix_rate = matrix_rate
        self.other_rate = other_rate
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self._parameters = matrices + others

    def step(self, scale: float) -> None:
        """One step at ``scale`` times the peak rates; gradients are cleared."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self.other_rate * scale
        self._adam.step()
        self._muon.step(self.matrix_rate * scale)
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What `load` needs to go on as if the run had never stopped."""
        return {"muon": self._muon.state, "adam": self._adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        for velocity, saved in zip(self._muon.state, state["muon"], strict=True):
            velocity.copy_(saved)
        self._adam.load_state_dict(state["adam"])
