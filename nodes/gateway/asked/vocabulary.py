"""The bytes of each token, which a gateway has from a tokenizer: the model's files may be on other hosts only.

Asked for when the first request needs it, and kept: 1 to 2 MB at 152,000 tokens.
"""

import struct
from collections.abc import Sequence

from mesh.actor import Answer
from nodes.gateway.errors import Internal
from nodes.protocol import VocabularyIs


class Vocabulary:
    """Token `i` is `data[offsets[i] : offsets[i + 1]]`; `offsets` are little-endian uint32."""

    def __init__(self, end_token_ids: Sequence[int] = (), offsets: bytes = b"", data: bytes = b"") -> None:
        self.end_token_ids = tuple(end_token_ids)
        self._offsets = offsets
        self._data = data
        self._num_tokens = len(offsets) // 4 - 1

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have, as rows of a padded embedding."""
        if not 0 <= token_id < self._num_tokens:
            return b""
        begin, end = struct.unpack_from("<II", self._offsets, 4 * token_id)
        return self._data[begin:end]


def vocabulary_of(answer: Answer) -> Vocabulary:
    """Raises Internal if it is none."""
    message, buffers = answer.message, answer.buffers
    if isinstance(message, VocabularyIs) and len(buffers) == 2:
        offsets, data = bytes(buffers[0]), bytes(buffers[1])
        is_whole = len(offsets) == 4 * (message.num_tokens + 1) > 0
        if is_whole and struct.unpack_from("<I", offsets, len(offsets) - 4) == (len(data),):
            return Vocabulary(message.end_token_ids, offsets, data)
    raise Internal("A tokenizer gave an answer that does not match the request.")
