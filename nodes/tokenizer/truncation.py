"""Cuts prompts to a number of tokens, as a request may ask (`Prepare.truncate_to`). Pure."""

from collections.abc import Sequence
from typing import NamedTuple


class Truncation(NamedTuple):
    """Keep at most `num_tokens` (0: all) of a prompt: its last ones, or its first."""

    num_tokens: int = 0
    keeps_first: bool = False

    def cut(self, token_ids: list[int], added: Sequence[int] = ()) -> list[int]:
        """The ids that are left. `added` is 1 for each that the tokenizer added around the text, such as a BOS: these
        stay, and count, as they do at transformers.
        """
        num = self.num_tokens
        if not num or len(token_ids) <= num:
            return token_ids
        head, tail = _run_of_ones(added), _run_of_ones(added[::-1])
        if head + tail > num:
            head = tail = 0
        kept, end = num - head - tail, len(token_ids) - tail
        middle = token_ids[head : head + kept] if self.keeps_first else token_ids[end - kept : end]
        return [*token_ids[:head], *middle, *token_ids[end:]]


def _run_of_ones(mask: Sequence[int]) -> int:
    return next((i for i, one in enumerate(mask) if not one), 0)
