"""What a request wants to know of the probabilities that its tokens were drawn with. Needs neither torch nor numpy.

For each drawn token its row's extra is, little-endian: float32 logarithm of its probability, int32 rank from 1, then
for each of the `top` most likely tokens int32 id and float32 logarithm, then a float32 logarithm for each of `ids`.
"""

import struct
from collections.abc import Iterable

from nodes.asks.edits import UNLIKELIEST, RowReads


def certain(token_id: int, reads: RowReads) -> bytes:
    """The extra of a token that was drawn with probability 1: equally likely tokens follow by their ids."""
    others = (one for one in range(reads.top + 1) if one != token_id)
    top = [token_id, *others][: reads.top]
    likely = [(one, 0.0 if one == token_id else UNLIKELIEST) for one in top]
    return packed(0.0, 1, likely, [0.0 if one == token_id else UNLIKELIEST for one in reads.ids])


def echoed(position: int, before: int, token_id: int, reads: RowReads) -> bytes:
    """What the echo model says of the prompt's token at `position`, after the token `before`: any wrong one shows."""
    logprob = -(position + before) / 4096
    others = [one for one in range(reads.top + 1) if one != token_id]
    return packed(logprob, 1, [(token_id, logprob), *((one, UNLIKELIEST) for one in others)][: reads.top], ())


def packed(logprob: float, rank: int, top: Iterable[tuple[int, float]], ids: Iterable[float]) -> bytes:
    """An extra of these numbers."""
    pairs = b"".join(struct.pack("<if", *pair) for pair in top)
    return struct.pack("<fi", logprob, rank) + pairs + b"".join(struct.pack("<f", one) for one in ids)
