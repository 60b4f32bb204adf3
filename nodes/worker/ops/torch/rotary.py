"""Rotary position embedding: frequencies, and a table of cosines and sines.

The types of transformers' `rope_type`: `default`, `linear` (Chen et al. 2023), `llama3` (frequencies of short
wavelengths stay, those of long ones are divided, with a smooth transition), `yarn` and `longrope`.
"""

import math
from typing import Final

import torch
from torch import Tensor

from nodes.model_spec import RopeParameters

_GROWTH: Final = 4096


class RotaryTable:
    """Cosines and signed sines of all positions seen so far, float32.

    Grows in pieces of fixed size, so that an angle's bits do not depend on when its position was first seen.
    """

    def __init__(self, parameters: RopeParameters, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(parameters, head_dim)
        self._factor = parameters.attention_factor
        self._cos = torch.empty(0, head_dim)
        self._sin = torch.empty(0, head_dim)

    def tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of at least the first `num_positions`, each `[positions, head_dim]`.

        The first half of the sines is negated: rotating is then one swap of halves and no negation.
        """
        while self._cos.shape[0] < num_positions:
            self._grow()
        return self._cos, self._sin

    def _grow(self) -> None:
        first = self._cos.shape[0]
        angles = torch.outer(torch.arange(first, first + _GROWTH, dtype=torch.float32), self._frequencies)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((self._cos, torch.cat((cos, cos), -1)))
        self._sin = torch.cat((self._sin, torch.cat((-sin, sin), -1)))


def inverse_frequencies(parameters: RopeParameters, head_dim: int) -> Tensor:
    """Angle per position of each pair, float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (parameters.theta**exponents)
    if parameters.rope_type == "linear":
        return frequencies / parameters.factor
    if parameters.rope_type == "llama3":
        return _llama3(frequencies, parameters)
    if parameters.rope_type == "yarn":
        return _yarn(frequencies, parameters, head_dim)
    if parameters.rope_type == "longrope":
        return frequencies / torch.tensor(parameters.divisors, dtype=torch.float32)
    return frequencies


def _yarn(frequencies: Tensor, parameters: RopeParameters, head_dim: int) -> Tensor:
    """Pairs of `beta_fast` or more turns in the original context stay, those of `beta_slow` or fewer are divided."""
    turns = (parameters.beta_fast, parameters.beta_slow)
    context, base = parameters.original_context_length, 2 * math.log(parameters.theta)
    low, high = (head_dim * math.log(context / (count * 2 * math.pi)) / base for count in turns)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    return frequencies / parameters.factor * slowed + frequencies * (1 - slowed)


def _llama3(frequencies: Tensor, parameters: RopeParameters) -> Tensor:
    context = parameters.original_context_length
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / parameters.factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * slowed / parameters.factor + smooth * slowed
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, smoothed, slowed)
