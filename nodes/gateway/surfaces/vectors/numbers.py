"""What is made of the numbers that workers pooled: vectors of length one, scores, shares of classes. Pure, float32."""

from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

_LEAST: Final = 1e-12
"""A length below which nothing is divided: torch's, for `normalize`."""


def row_of(data: bytes) -> Row:
    """Numbers as they go over the wire: float32, little-endian."""
    return np.frombuffer(data, "<f4")


def bytes_of(row: Row) -> bytes:
    """The same, as base64 has them whatever the host's order of bytes."""
    return row.astype("<f4", copy=False).tobytes()


def normalized(row: Row) -> Row:
    """A row of length one; zeros stay."""
    return row / np.maximum(_length(row), np.float32(_LEAST))


def shortened(row: Row, dimensions: int | None, *, normalize: bool) -> Row:
    """The first `dimensions` numbers, of length one if wished."""
    row = row[:dimensions]
    return normalized(row) if normalize else row


def cosine(one: Row, other: Row) -> float:
    """The cosine of the angle between two rows."""
    # In double precision: texts that are nearly alike differ in the last bits of a cosine.
    wide, others = one.astype(np.float64), other.astype(np.float64)
    return float(wide @ others / max(float(np.linalg.norm(wide) * np.linalg.norm(others)), _LEAST))


def activated(row: Row, activation: Literal["identity", "sigmoid", "softmax"]) -> Row:
    """Logits as shares."""
    if activation == "sigmoid":
        return _sigmoid(row)
    return _softmax(row) if activation == "softmax" else row


def _length(row: Row) -> Any:
    return np.sqrt(np.sum(np.square(row, dtype=np.float64))).astype(np.float32)


def _sigmoid(row: Row) -> Row:
    # By tanh, which does not overflow.
    return (np.tanh(row * np.float32(0.5)) + np.float32(1)) * np.float32(0.5)


def _softmax(row: Row) -> Row:
    shares = np.exp(row - row.max())
    return shares / shares.sum()
