"""What a request does to a draw, as data: edits of a row's logits, and what is read beside the drawn token.

An editor maps (tokens so far, output position) to `RowEdits` and never sees logits: so its answer is the same on every
kind of device, can be computed beside the forward pass, and needs nothing to survive a death. Needs no numpy.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from mesh.errors import TypedError

MAX_TOP: Final = 20
"""Most likely tokens reported beside a drawn one: OpenAI's limit; 168 bytes for each token, on every hop."""
UNLIKELIEST: Final = -9999.0
"""Written for the logarithm of 0, as in vLLM: JSON has no infinity."""

LogprobsOf = Literal["raw", "processed"]


class EditFailed(TypedError, code="editor_failed"):
    """An editor cannot say what may be drawn: its row fails with this code, and no other row."""


class RowEdits:
    """Edits of one row's logits, applied in this order: `mask` and `floor`, `bias`, `scale`, `add`.

    `mask`: one bit for each id, 32 in a little-endian word, set where the id may be drawn; ids beyond it may not. None:
    all may. Ids in `floor` may not be drawn either. `bias` is added to a logit; then a positive one is divided by
    `scale`, a negative one multiplied by it; then `add` is added. Ids outside of the vocabulary are ignored.
    `delayed` are those of the floor that may be drawn after all where a mask allows nothing else: what ends an answer
    too early for `min_tokens` still ends it if there is nothing left to say.
    """

    __slots__ = ("add", "bias", "delayed", "floor", "mask", "scale")

    def __init__(self) -> None:
        self.mask: bytes | None = None
        self.floor: set[int] = set()
        self.delayed: frozenset[int] = frozenset()
        self.bias: dict[int, float] = {}
        self.scale: dict[int, float] = {}
        self.add: dict[int, float] = {}

    def allow(self, mask: bytes) -> None:
        """Forbid whatever `mask` does not allow, besides what is forbidden already."""
        if self.mask is None:
            self.mask = mask
            return
        size = min(len(mask), len(self.mask))
        both = int.from_bytes(mask[:size], "little") & int.from_bytes(self.mask[:size], "little")
        self.mask = both.to_bytes(size, "little")

    def forbid(self, token_id: int) -> None:
        """Forbid an id even where nothing else is allowed."""
        self.floor.add(token_id)
        self.delayed -= {token_id}

    def delay(self, token_ids: frozenset[int]) -> None:
        """Forbid these ids, unless nothing else is allowed."""
        self.delayed |= token_ids - self.floor
        self.floor |= token_ids

    def let_delayed(self) -> None:
        """Allow the delayed ids if nothing else is allowed. For an editor that all others precede."""
        if self.delayed and self.allows_nothing():
            self.floor -= self.delayed
            self.delayed = frozenset()

    def allows_nothing(self) -> bool:
        """Whether mask and floor leave nothing to draw. Without a mask something is always left."""
        if self.mask is None:
            return False
        left = bytearray(self.mask)
        for token_id in self.floor:
            if 0 <= token_id >> 3 < len(left):
                left[token_id >> 3] &= ~(1 << (token_id & 7))
        # By far the fastest way to look at 20 kB.
        return left.count(0) == len(left)

    def allows(self, token_id: int) -> bool:
        """Whether an id may be drawn."""
        if token_id in self.floor:
            return False
        if self.mask is None:
            return True
        return token_id >> 3 < len(self.mask) and bool(self.mask[token_id >> 3] >> (token_id & 7) & 1)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """The mask that allows these ids of a vocabulary, and no others."""
    mask = bytearray(4 * -(-vocab_size // 32))
    for token_id in token_ids:
        if 0 <= token_id < vocab_size:
            mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


class RowReads(NamedTuple):
    """What is read of a row's distribution beside the drawn token: logprobs of the `top` most likely ids, and of `ids`.

    `raw`: of the logits as the model gives them; `processed`: after edits and temperature. Filters (`top_k`, `top_p`,
    `min_p`) change nothing: a token that they leave out keeps its probability.
    """

    top: int = 0
    ids: tuple[int, ...] = ()
    of: LogprobsOf = "raw"


class Editor(Protocol):
    """Edits the rows of one open sequence; used in one thread. A cache of a pure function, and nothing more.

    A row may be drawn again (a step sent again, a row run alone), also for an earlier position: the edits are the same.
    """

    def edit(self, history: Sequence[int], position: int, edits: RowEdits) -> None:
        """Write this ask's edits for the token at output position `position` into `edits`.

        `history` holds all tokens before it, prompt and output, if the ask looks back; else it is empty. The output
        begins at `len(history) - position`. May raise: the row then fails, and no other.
        """
        ...
