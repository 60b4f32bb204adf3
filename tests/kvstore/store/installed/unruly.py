"""A store that fails on purpose, in every way that draws from a seed choose; for whoever must live with one."""

import random
from collections import Counter
from collections.abc import Sequence

from kvstore.store.installed.plugins import InstalledStore
from kvstore.store.installed.values import PageValues
from kvstore.store.place import StoreIdentity
from tests.kvstore.store.pages import content

PAGE = 256
IDENTITY = StoreIdentity(host="", layout_digest=b"l" * 16, page_bytes=PAGE // 2, tp_size=2, numerics="torch/avx2")
OTHER = StoreIdentity(host="", layout_digest=b"l" * 16, page_bytes=PAGE // 2, tp_size=2, numerics="torch/avx512")
VALUES = PageValues(IDENTITY)


class Refused(BaseException):
    """Not even an Exception."""


def page_of(page_hash: bytes) -> bytes:
    return content(page_hash, PAGE)


def value_of(page_hash: bytes, data: bytes, identity: StoreIdentity = IDENTITY) -> bytes:
    """A sealed value with this data, whatever the hash says."""
    view = memoryview(data)
    return bytes(PageValues(identity).seal(page_hash, [view[: PAGE // 2], view[PAGE // 2 :]]))


class UnrulyStore(InstalledStore):
    """A call misbehaves in one of `evil` of all cases. `counts` says what it did."""

    def __init__(self, draw: random.Random, evil: float) -> None:
        self.draw = draw
        self.evil = evil
        self.kept: dict[bytes, bytes] = {}
        self.removed: list[bytes] = []
        self.buffers: list[memoryview] = []
        self.counts: Counter[str] = Counter()
        self.num_calls = 0
        self.num_closed = 0

    def contains(self, hashes: Sequence[bytes]) -> Sequence[bool]:
        answer = [one in self.kept for one in hashes]
        return self._answer("contains", [not one if self._is("lie") else one for one in answer])

    def get(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        assert [len(buffer) for buffer in buffers] == [VALUES.value_bytes] * len(hashes)
        assert len(hashes) <= 64
        answer: list[bool] = []
        for page_hash, buffer in zip(hashes, buffers, strict=True):
            value = self._spoilt(page_hash)
            buffer[: len(value)] = value
            answer.append(page_hash in self.kept or self._is("said to be there"))
        if self._is("written later"):
            self.buffers += buffers
        elif self._is("released"):
            for buffer in buffers:
                buffer.release()
        return self._answer("get", answer)

    def put(self, hashes: Sequence[bytes], values: Sequence[memoryview]) -> Sequence[bool]:
        assert all(value.readonly for value in values)
        kept = [not self._is("not kept") for _ in hashes]
        for page_hash, value, is_kept in zip(hashes, values, kept, strict=True):
            if is_kept and not self._is("lost"):
                self.kept[page_hash] = bytes(value)
        return self._answer("put", kept)

    def remove(self, hashes: Sequence[bytes]) -> None:
        self.removed += hashes
        for page_hash in hashes:
            self.kept.pop(page_hash, None)
        self._answer("remove", [])

    def close(self) -> None:
        self.num_closed += 1
        self._answer("close", [])

    def scribble(self) -> None:
        """What it was given once is written to when it is long back."""
        for buffer in self.buffers:
            at = self.draw.randrange(len(buffer))
            buffer[at] ^= 1 << self.draw.randrange(8)
            self.counts["scribbled"] += 1

    def _is(self, what: str) -> bool:
        if self.draw.random() >= self.evil:
            return False
        self.counts[what] += 1
        return True

    def _spoilt(self, page_hash: bytes) -> bytes:
        value = self.kept.get(page_hash, b"")
        if not self._is("spoilt"):
            return value
        how = self.draw.choice(("other page", "half another", "flipped", "short", "empty", "foreign", "resealed"))
        self.counts[how] += 1
        other = self.kept[self.draw.choice(sorted(self.kept))] if self.kept else value
        # Between the fields of what is before the page as well.
        at = self.draw.choice((8, 24, 40, 48, self.draw.randrange(len(value)))) if value else 0
        match how:
            case "other page":
                return other
            case "half another":
                return value[:at] + other[at:]
            case "flipped":
                return value[:at] + bytes([value[at] ^ 1 << self.draw.randrange(8)]) + value[at + 1 :] if value else b""
            case "short":
                return value[:at]
            case "foreign":
                return value_of(page_hash, page_of(page_hash)[::-1], OTHER)
            case "resealed":
                # What was written for another hash: its checksum is right.
                return value_of(other[24:40], page_of(other[24:40])) if other else b""
            case _:
                return b""

    def _answer(self, name: str, answer: list[bool]) -> Sequence[bool]:
        self.num_calls += 1
        if not self._is(f"{name} misbehaves"):
            return answer
        how = self.draw.choice(("raises", "too few", "too many", "nothing", "endless", "cannot be judged"))
        self.counts[how] += 1
        match how:
            case "raises":
                raise self.draw.choice((OSError("down"), ValueError(), SystemExit(3), Refused()))
            case "too few":
                return answer[:-1]
            case "too many":
                return [*answer, None]  # type: ignore[list-item]
            case "nothing":
                return None  # type: ignore[return-value]
            case "endless":
                return iter(lambda: True, False)  # type: ignore[return-value]
            case _:
                return [Unjudged() for _ in answer]  # type: ignore[misc]


class Unjudged:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise TypeError("not this way")
