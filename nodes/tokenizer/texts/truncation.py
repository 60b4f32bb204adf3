"""Cuts prompts to a number of tokens, as a request may ask (`Prepare.truncate_to`). Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nodes.tokenizer.errors import InvalidValue


class Truncation(NamedTuple):
    """Keep at most `num_tokens` (0: all) of a prompt: its last ones, or its first."""

    num_tokens: int = 0
    keeps_first: bool = False

    def cut(self, token_ids: list[int], added: Sequence[int] = ()) -> list[int]:
        """The ids that are left. `added` is 1 for each that the tokenizer added around the text, such as a BOS: these
        stay, and count, as they do at transformers. Raises InvalidValue where they leave no room for the text.
        """
        num = self.num_tokens
        if not num or len(token_ids) <= num:
            return token_ids
        head, tail = _run_of_ones(added), _run_of_ones(added[::-1])
        if head + tail >= num:
            # Of these alone a vector or an answer would be about nothing, and look like any other.
            raise too_few(num, min(head + tail, len(added)), "a text")
        end = len(token_ids) - tail
        return [*token_ids[:head], *self.cut_to(token_ids[head:end], num - head - tail), *token_ids[end:]]

    def cut_to(self, token_ids: list[int], num: int) -> list[int]:
        """At most `num` of them."""
        return token_ids[:num] if self.keeps_first else token_ids[max(len(token_ids) - num, 0) :]


WHOLE: Final = Truncation()


def too_few(num: int, num_added: int, what: str, least: int = 1) -> InvalidValue:
    """`least`: tokens of the texts themselves that have to be left."""
    message = (
        f"'truncate_prompt_tokens' leaves room for {num}, but this model's tokenizer adds {num_added} to {what}: give "
        f"at least {num_added + least}."
    )
    return InvalidValue(message, "truncate_prompt_tokens")


def longest_first(num_first: int, num_second: int, most: int) -> tuple[int, int]:
    """How many tokens of a pair's texts are left where there may be `most` together: the longer one gives first, as at
    transformers. An odd token is the longer one's, among equals the second's.
    """
    short = min(num_first, num_second, most // 2)
    if num_first + num_second <= most:
        return num_first, num_second
    return (most - short, short) if num_first > num_second else (short, most - short)


def _run_of_ones(mask: Sequence[int]) -> int:
    return next((i for i, one in enumerate(mask) if not one), len(mask))
