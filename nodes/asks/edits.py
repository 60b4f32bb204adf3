"""What is changed about one row's logits before a token is drawn from them."""


class RowEdits:
    """Applied in this order: `mask` and `floor`, `bias`, `scale`, `add`; then temperature and filters of the request.

    `mask`: uint32 words, little-endian, a bit for each token id, set if it may be drawn; ids beyond it may not be.
    `floor`: ids that may not be drawn. `bias` is added to logits. `scale`: positive logits are divided by it, negative
    ones multiplied. `add` is added last. Ids outside the vocabulary are ignored.
    """

    __slots__ = ("add", "bias", "floor", "mask", "scale")

    def __init__(self) -> None:
        self.mask: bytes | bytearray | memoryview | None = None
        self.floor: set[int] = set()
        self.bias: dict[int, float] = {}
        self.scale: dict[int, float] = {}
        self.add: dict[int, float] = {}
