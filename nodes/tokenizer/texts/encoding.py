"""Text to token ids and back, as transformers does it with the same files. Pure; used by `nodes/tokenizer/actor.py`."""

import os
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from nodes.context_length import over_context, over_context_in_chars
from nodes.model_spec import ModelSpec
from nodes.model_spec.end_tokens import with_vocabulary
from nodes.model_spec.token_bytes import added_ids, token_bytes
from nodes.model_spec.vocabulary import facts_of, load_tokenizer
from nodes.protocol import VocabularyIs
from nodes.tokenizer.errors import ContextLengthExceeded, EmptyPrompt, InvalidTokenId
from nodes.tokenizer.texts.truncation import WHOLE, Truncation, longest_first, too_few

MIN_CHARS_PER_TOKEN: Final = 8
"""The bound on characters assumes at least this for the longest token, even in vocabularies of single bytes."""


class Pair(NamedTuple):
    """Token ids of two texts, and where those of type 1 begin; 0: there are none."""

    token_ids: list[int]
    second_from: int


class TextEncoder:
    """One model's tokenizer. A text of more than `max_chars` cannot fit `context_length`, since no token is longer than
    the vocabulary's longest: it is refused without being encoded.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, context_length: int, end_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = list(end_token_ids)
        self._vocab_size = vocab_size
        self.context_length = context_length
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._num_tokens = max(vocabulary.values(), default=-1) + 1
        longest = max(map(len, vocabulary), default=0)
        self.max_chars = context_length * max(longest, MIN_CHARS_PER_TOKEN)

    def check_chars(self, text: str, param: str) -> None:
        """Raise ContextLengthExceeded for a text that no tokenization could make fit."""
        if len(text) > self.max_chars:
            raise self.too_many_chars(param)

    def too_many_chars(self, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(over_context_in_chars(self.context_length, param, self.max_chars), param)

    def encode(self, text: str, *, add_special_tokens: bool, truncation: Truncation | None = None) -> list[int]:
        """Token ids; with `add_special_tokens`, also those that the tokenizer's post-processor adds (mostly a BOS).

        Raises InvalidValue where a truncation leaves room for those alone.
        """
        # The batch call can leave out offsets, which take more time than the token ids.
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if truncation is None or not truncation.num_tokens:
            return encoded.ids
        return truncation.cut(encoded.ids, encoded.special_tokens_mask)

    def encode_pair(
        self, first: str, second: str, *, add_special_tokens: bool, after: str = "", truncation: Truncation = WHOLE
    ) -> Pair:
        """A pair as the post-processor joins it; without special tokens, the ids of its texts and those of `after`.

        Raises InvalidValue where a text of a pair that is cut would be left without a token.
        """
        if not add_special_tokens:
            head, middle, tail = (self.encode(text, add_special_tokens=False) for text in (first, second, after))
            # Never without the second text: then there are more than are wanted, which the gateway refuses by its name.
            room = max(truncation.num_tokens - len(head) - len(tail), 1)
            kept = middle if not truncation.num_tokens else truncation.cut_to(middle, room)
            return Pair([*head, *kept, *tail], 0)
        encode = self._tokenizer.encode_batch_fast
        joined = encode([(first, second)], add_special_tokens=True)[0]
        if 0 < truncation.num_tokens < len(joined):
            # Encoded anew and apart: of a pair that is joined nobody can tell any more which text a token is of.
            one, other = encode([first, second], add_special_tokens=False)
            num_added = self._tokenizer.num_special_tokens_to_add(is_pair=True)
            room = truncation.num_tokens - num_added
            if room < (least := min(len(one), 1) + min(len(other), 1)):
                raise too_few(truncation.num_tokens, num_added, "a pair of texts", least)
            direction = "right" if truncation.keeps_first else "left"
            for encoding, most in zip((one, other), longest_first(len(one), len(other), room), strict=True):
                encoding.truncate(most, direction=direction)
            joined = self._tokenizer.post_process(one, other, add_special_tokens=True)
        types = joined.type_ids
        return Pair(joined.ids, types.index(1) if 1 in types else 0)

    def check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        """Raise EmptyPrompt, InvalidTokenId or ContextLengthExceeded for a prompt that cannot be served."""
        if not token_ids:
            raise EmptyPrompt(f"{param} has no tokens. Give at least one.", param)
        if len(token_ids) >= self.context_length:
            raise ContextLengthExceeded(over_context(self.context_length, param, len(token_ids)), param)
        self.check_ids(token_ids, param)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidTokenId for an id without an embedding."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            bad = next(i for i in token_ids if not 0 <= i < self._vocab_size)
            # A tokenizer may have tokens that the model has no embedding for: clients know those by their text.
            text = self._tokenizer.id_to_token(bad) if 0 <= bad < self._num_tokens else None
            named = "" if text is None else f" ({text!r}), which this model has no embedding for"
            raise InvalidTokenId(
                f"{param} contains token id {bad}{named}; valid ids are 0 to {self._vocab_size - 1}.", param
            )

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids; ids that the tokenizer does not have give no text."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """By text, the tokens that were added to the vocabulary, special ones and others."""
        return added_ids(self._tokenizer)

    @cached_property
    def vocabulary(self) -> tuple[VocabularyIs, tuple[bytes, bytes]]:
        """The bytes of every token as they go to gateways: the message and its buffers."""
        table = token_bytes(self._tokenizer)
        offsets = list(accumulate(map(len, table), initial=0))
        packed = struct.pack(f"<{len(offsets)}I", *offsets)
        return VocabularyIs(num_tokens=len(table), end_token_ids=self._end_token_ids), (packed, b"".join(table))


def load_encoder(spec: ModelSpec, context_length: int = 0) -> TextEncoder:
    """`context_length` 0 is the model's own. Raises `nodes.model_spec.ModelError`. If there is a tokenizer.json, its
    post-processor decides about BOS and EOS, and `add_bos_token` in tokenizer_config.json is ignored, as in
    transformers 5.
    """
    # One text at a time gains nothing from a thread pool, and cores belong to the workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = load_tokenizer(spec)
    # As in the plan, which tells schedulers what ends an answer.
    ends = with_vocabulary(spec, facts_of(tokenizer, spec)).eos_token_ids
    return TextEncoder(tokenizer, spec.vocab_size, context_length or spec.context_length, ends)
