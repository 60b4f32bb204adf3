"""Which pages are open, when the mesh is asked for them, and what each of them has not been told yet. Pure.

    open -> due -> begin (the mesh is asked) gathered, end -> take, page by page -> due a second later …

While no page is open nothing is asked and nothing is kept. A page that reads slowly misses rounds, and with the next
one is told all of what it has missed that is still kept: there is no queue of events.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from mesh.address import Address
from nodes.gateway.page.shown import CallShown, DeathShown, MeshShown, SampleShown

MAX_PAGES: Final = 64
"""At a gateway: each is sent some 10 KB a second, for which the gateway works a millisecond."""
EVERY_S: Final = 1.0
"""People read no faster; a round asks each actor once."""
MAX_CALLS: Final = 100
"""Twice what a page shows: some 100 KB for one that is opened."""
MAX_DEATHS: Final = 64
"""As many as a gateway remembers beside its calls (`CallLog`)."""
MAX_SAMPLES: Final = 120
"""Of an actor: ten minutes."""

_Item = TypeVar("_Item")


class _Told(Generic[_Item]):
    """The last items, each with the number of the round that brought it."""

    def __init__(self, most: int) -> None:
        self._items: deque[tuple[int, _Item]] = deque(maxlen=most)

    def add(self, number: int, item: _Item) -> None:
        self._items.append((number, item))

    def since(self, number: int) -> list[_Item]:
        return [item for came, item in self._items if came > number]


class FeedCore:
    """The pages of one gateway. `now` is any clock, in seconds."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._num_opened = 0
        self._round = 0
        self._began_at: float | None = None
        self._is_asking = False
        self._state: MeshShown | None = None
        self._samples: dict[Address, _Told[SampleShown]] = {}
        self._numbers: dict[Address, int] = {}
        self._calls = _Told[CallShown](MAX_CALLS)
        self._known: deque[str] = deque(maxlen=MAX_CALLS)
        self._dead: deque[Address] = deque(maxlen=MAX_DEATHS)
        self._deaths = _Told[DeathShown](MAX_DEATHS)
        self._encoded: dict[int, bytes] = {}

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def numbers(self) -> Mapping[Address, int]:
        """Of each incarnation, the number of the last sample that is known."""
        return self._numbers

    def open(self) -> int | None:
        """A page was opened: its id. None: there are too many."""
        if len(self._pages) >= MAX_PAGES:
            return None
        self._num_opened += 1
        self._pages[self._num_opened] = -1
        return self._num_opened

    def close(self, page: int) -> None:
        """Calling this again is harmless."""
        self._pages.pop(page, None)
        if not self._pages:
            # What was gathered would be old when the next page comes, and to that one it would look new.
            self._state = None
            self._samples, self._numbers, self._encoded = {}, {}, {}
            self._calls = _Told[CallShown](MAX_CALLS)
            self._deaths = _Told[DeathShown](MAX_DEATHS)
            self._known.clear()
            self._dead.clear()

    def due(self, now: float) -> float | None:
        """In how many seconds a round has to begin; None: none has to, or one is under way."""
        if not self._pages or self._is_asking:
            return None
        return 0.0 if self._began_at is None else max(0.0, self._began_at + EVERY_S - now)

    def begin(self, now: float) -> None:
        self._is_asking, self._began_at = True, now

    def end(self) -> None:
        """The round that was begun is over, whatever it brought."""
        self._is_asking = False

    def gathered(
        self,
        state: MeshShown,
        samples: Mapping[Address, Sequence[SampleShown]],
        calls: Sequence[CallShown],
        deaths: Sequence[DeathShown] = (),
    ) -> None:
        """A round brought this. `samples` has an entry for each incarnation that there is; others are forgotten."""
        if not self._pages:
            # The last page was closed while the mesh was asked.
            return
        self._round += 1
        self._state = state
        self._encoded = {}
        self._samples = {address: self._samples.get(address) or _Told(MAX_SAMPLES) for address in samples}
        self._numbers = {address: number for address, number in self._numbers.items() if address in samples}
        for address, new in samples.items():
            for sample in new:
                if sample.number > self._numbers.get(address, 0):
                    self._numbers[address] = sample.number
                    self._samples[address].add(self._round, sample)
        for call in sorted(calls, key=lambda one: one.at + one.total_s):
            if call.id not in self._known:
                self._known.append(call.id)
                self._calls.add(self._round, call)
        for death in sorted(deaths, key=lambda one: one.at):
            if (dead := Address(death.actor, death.epoch)) not in self._dead:
                self._dead.append(dead)
                self._deaths.add(self._round, death)

    def take(self, page: int) -> bytes | None:
        """What a page has to be told now, as JSON; None: nothing that is new."""
        seen = self._pages.get(page, self._round)
        if self._state is None or seen >= self._round:
            return None
        self._pages[page] = self._round
        if seen not in self._encoded:
            # Once for all pages that have seen the same, which are nearly all of them.
            whole = msgspec.structs.replace(
                self._state,
                samples=[sample for told in self._samples.values() for sample in told.since(seen)],
                calls=self._calls.since(seen),
                deaths=self._deaths.since(seen),
            )
            self._encoded[seen] = msgspec.json.encode(whole)
        return self._encoded[seen]
