"""A Mooncake Store in memory that fails on purpose, with the numbers that the real one was seen to give (0.3.13)."""

from collections import Counter


class FakePool:
    """What `MooncakeDistributedStore` does, for any number of stores at once.

    `is_away`: the master is gone. `has_room`: how many more values fit. Keys of `silent` are on a host that does not
    answer. `counts` are calls by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.silent: set[str] = set()
        self.is_away = False
        self.has_room = 1000
        self.is_closed = False
        self.counts: Counter[str] = Counter()

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.counts["exist"] += 1
        return [-900 if self.is_away else int(key in self.values) for key in keys]

    def get_batch(self, keys: list[str]) -> list[bytes]:
        self.counts["get"] += 1
        return [b"" if self.is_away or key in self.silent else self.values.get(key, b"") for key in keys]

    def get_size(self, key: str) -> int:
        return len(self.values[key])

    def put(self, key: str, value: memoryview) -> int:
        self.counts["put"] += 1
        if self.is_away:
            return -900
        if key in self.values:
            return 0
        if not self.has_room:
            return -200
        self.has_room -= 1
        self.values[key] = bytes(value)
        return 0

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self.counts["remove"] += 1
        if self.is_away:
            return [-900] * len(keys)
        # Whatever was read of late has a lease.
        return [-706 if not force else 0 if self.values.pop(key, None) is not None else -704 for key in keys]

    def close(self) -> int:
        self.is_closed = True
        return 0
