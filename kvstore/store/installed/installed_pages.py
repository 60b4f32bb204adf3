"""An installed store as what agents store pages in and read them from, as if it were a `PageStore`.

    find      `contains`, in a thread; the pages that are there get numbers (`known_pages.py`)
    read      `get` into buffers of our own; then, in another thread, each value is taken apart, and copied into the
              pool's memory if it is the page's. What is not is removed
    write     pages are copied out of the pool into values; `poll` returns the write, whose owner compares generations,
              and `commit` has them `put`

So a page is right or a miss, whatever the store does, and a store that hangs costs what `calls.py` gives up: threads
and buffers, never memory of a pool. Its owner calls all methods from one thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from typing_extensions import override

from kvstore.store.index import Claim, PageName
from kvstore.store.installed.calls import BoundedCalls, truths
from kvstore.store.installed.known_pages import KnownPages
from kvstore.store.installed.plugins import InstalledStore
from kvstore.store.installed.values import PageValues, UnsignedValue
from kvstore.store.interface import READ_ONLY, Store, Stored
from kvstore.store.lanes import Lane, ThreadLane
from kvstore.store.missing import CORRUPT as MISSING_CORRUPT
from kvstore.store.missing import UNREADABLE, WRITE_FAILED
from kvstore.store.missing import UNSIGNED as MISSING_UNSIGNED
from kvstore.store.operations import CORRUPT, FAILED, MEMORY_GONE, STALE, UNSIGNED, Read, Write

CONTAINS: Final = "contains"
GET: Final = "get"
PUT: Final = "put"
REMOVE: Final = "remove"
THREADS: Final = {CONTAINS: 1, GET: 2, PUT: 1, REMOVE: 1}
"""Two for `get`, so that one value comes while another is on its way; the others are short, or nobody waits."""
MISSING: Final = "missing"
_WHYS: Final = {CORRUPT: MISSING_CORRUPT, UNSIGNED: MISSING_UNSIGNED, FAILED: UNREADABLE}


class CallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and pages of one call, bytes that may be on their way in each direction, and pages that have numbers.

    8 MiB take 80 ms at 100 MB/s, so a store that slow is not given up. What is on its way to the store is in memory,
    as copies; what comes is in buffers only while it is got. 65,536 pages are a million tokens, and 16 MB of numbers.
    """

    call_bytes: int = 8 << 20
    call_pages: int = 64
    reading_bytes: int = 1 << 30
    writing_bytes: int = 64 << 20
    num_known: int = 1 << 16


DEFAULT_CALL_LIMITS: Final = CallLimits()


class _Wanted(NamedTuple):
    """Pages of one call: their positions in the `Read` or `Write`, and their hashes."""

    positions: Sequence[int]
    hashes: Sequence[bytes]


class _Reading:
    """A read: the calls that it still needs, and how many are under way."""

    def __init__(self, read: Read, waiting: Sequence[_Wanted]) -> None:
        self.read = read
        self.waiting = deque(waiting)
        self.num_running = 0


class InstalledPages(Store):
    """See the module. `calls` has the threads of `THREADS`, `copying` is where pages are copied and checked."""

    def __init__(
        self,
        store: InstalledStore,
        values: PageValues,
        page_bytes: int,
        calls: BoundedCalls,
        copying: Lane | None = None,
        limits: CallLimits = DEFAULT_CALL_LIMITS,
    ) -> None:
        super().__init__(page_bytes, limits.num_known, limits.reading_bytes, limits.writing_bytes)
        self._store = store
        self._values = values
        self._calls = calls
        self._copying = copying or ThreadLane("kv-store-copy", 1)
        self._call_pages = max(1, min(limits.call_pages, limits.call_bytes // values.value_bytes))
        self._known = KnownPages(limits.num_known)
        self._putting: set[bytes] = set()
        self._sealed: dict[Write, list[memoryview | None]] = {}

    @property
    @override
    def is_loaded(self) -> bool:
        return True

    @override
    def find(self, prompts: Sequence[Sequence[bytes]], answer: Callable[[list[Stored]], None]) -> None:
        # Prompts of one message often begin alike, and a store over a network takes each hash as a key to look up.
        hashes = list(dict.fromkeys(chain.from_iterable(prompts)))
        if not hashes:
            answer(self._numbered(prompts, [], []))
            return
        self._counts["queried"] += len(hashes)
        self._calls.submit(
            CONTAINS,
            # Lists of its own: who knows what becomes of them.
            lambda: truths(self._store.contains(list(hashes)), len(hashes)),
            lambda found: answer(self._numbered(prompts, hashes, found)),
        )

    @override
    def holds(self, hashes: Sequence[bytes]) -> list[bool]:
        return [page_hash in self._known for page_hash in hashes]

    @override
    def sequences(self, slots: Sequence[int]) -> list[int]:
        return self._known.sequences(slots)

    @override
    def commit(self, write: Write, is_good: Sequence[bool]) -> None:
        sealed = zip(is_good, self._sealed[write], strict=True)
        super().commit(write, [good and value is not None for good, value in sealed])

    @override
    def poll(self) -> list[Read | Write]:
        self._calls.poll()
        self.why_off, self.last_failure = self._calls.why_off, self._calls.last_failure
        return super().poll()

    @override
    def wait(self) -> None:
        self._calls.wait()

    @override
    def stats(self) -> dict[str, float]:
        calls = {f"call {name} {outcome}": float(count) for (name, outcome), count in self._calls.counts.items()}
        return {"loaded": 1.0, "stored": float(len(self._known)), **calls, **super().stats()}

    @override
    def close(self) -> None:
        # As one of `remove`, whose thread is the least likely to hang: it is called for wrong values only.
        self._calls.close(REMOVE, self._store.close)
        self._copying.close()

    # finding

    def _numbered(
        self, prompts: Sequence[Sequence[bytes]], hashes: Sequence[bytes], found: list[bool] | None
    ) -> list[Stored]:
        if found is None:
            return [Stored([], []) for _ in prompts]
        there: set[bytes] = set()
        for page_hash, is_there in zip(hashes, found, strict=True):
            if is_there:
                there.add(page_hash)
            else:
                # It has gone since, and is to be stored when it comes again.
                self._known.drop(page_hash)
        stored: list[Stored] = []
        for prompt in prompts:
            slots, sequences = Stored([], [])
            for page_hash in prompt:
                if page_hash not in there:
                    # What is behind a gap cannot be used, so it gets no number, of which there are so many only.
                    break
                slot, sequence = self._known.number(page_hash)
                slots.append(slot)
                sequences.append(sequence)
            self._counts["found"] += len(slots)
            stored.append(Stored(slots, sequences))
        return stored

    # reading

    @override
    def _begin_read(self, read: Read, held: Sequence[int]) -> None:
        self._advance(_Reading(read, self._cut([(number, self._known.hash_at(read.slots[number])) for number in held])))

    def _advance(self, reading: _Reading) -> None:
        """Begin the next calls of a read, or end it."""
        if not reading.read.is_needed:
            # Its request is over. Calls that run have buffers of their own, and end by themselves.
            reading.waiting.clear()
        while reading.waiting and reading.num_running < THREADS[GET]:
            some = reading.waiting.popleft()
            reading.num_running += 1
            self._calls.submit(GET, partial(self._get, some), partial(self._got, reading, some))
        if not reading.num_running:
            self._tell(partial(self._over, reading.read))

    def _get(self, some: _Wanted) -> list[bytearray | None]:
        """In a call's thread. The buffers are made here, so that only what is being got has some."""
        buffers = [bytearray(self._values.value_bytes) for _ in some.hashes]
        # Views may be released there, and the list changed; what is looked at afterwards is ours.
        there = truths(self._store.get(list(some.hashes), [memoryview(buffer) for buffer in buffers]), len(buffers))
        return [buffer if is_there else None for buffer, is_there in zip(buffers, there, strict=True)]

    def _got(self, reading: _Reading, some: _Wanted, buffers: list[bytearray | None] | None) -> None:
        if buffers is not None:
            self._copying.submit(partial(self._take, reading, some, buffers))
            return
        # The read has failed as a whole, so what it still needs is not asked for.
        reading.waiting.clear()
        self._settle(reading, some, [FAILED] * len(some.hashes))

    def _take(self, reading: _Reading, some: _Wanted, buffers: Sequence[bytearray | None]) -> None:
        """In the thread for copies."""
        outcomes: list[str] = []
        for position, page_hash, buffer in zip(some.positions, some.hashes, buffers, strict=True):
            try:
                parts = None if buffer is None else self._values.open(page_hash, buffer)
                if parts is None:
                    outcomes.append(MISSING if buffer is None else CORRUPT)
                    continue
                for memory, part in zip(reading.read.pages[position], parts, strict=True):
                    memory[:] = part
                outcomes.append("")
            except ValueError:
                # A view that was released: its pool was closed meanwhile.
                outcomes.append(MEMORY_GONE)
            except UnsignedValue:
                outcomes.append(UNSIGNED)
        self._tell(partial(self._settle, reading, some, outcomes))

    def _settle(self, reading: _Reading, some: _Wanted, outcomes: Sequence[str]) -> None:
        wrong: list[bytes] = []
        for position, page_hash, outcome in zip(some.positions, some.hashes, outcomes, strict=True):
            self._was_read(reading.read, position, outcome)
            if outcome == MISSING:
                reading.read.outcomes[position] = STALE
            # Not after a failure: the store may be away for a moment, and has its values when it is back.
            if outcome in (MISSING, CORRUPT, UNSIGNED):
                self._known.drop(page_hash)
            if outcome in _WHYS:
                self.missing.add_hashes([page_hash], _WHYS[outcome])
            if outcome in (CORRUPT, UNSIGNED):
                wrong.append(page_hash)
        if wrong:
            # Its end is of no interest: a value that stays is refused again, at the cost of one more read.
            self._calls.submit(REMOVE, partial(self._store.remove, wrong), lambda _: None)
        reading.num_running -= 1
        self._advance(reading)

    # writing

    @override
    def _refusal(self, num_bytes: int) -> str:
        # Said as a disk says it: nothing is written there.
        return READ_ONLY if self.why_off else super()._refusal(num_bytes)

    @override
    def _claim(self, names: Sequence[PageName]) -> list[Claim]:
        fresh: dict[bytes, PageName] = {}
        for name in names:
            if name.page_hash not in self._known and name.page_hash not in self._putting:
                fresh.setdefault(name.page_hash, name)
        self._putting.update(fresh)
        # No slots: where a value lies is the store's affair, and it gets a number when it is there.
        return [Claim(0, 0, name) for name in fresh.values()]

    @override
    def _begin_write(self, write: Write) -> None:
        self._copying.submit(partial(self._seal, write))

    @override
    def _keep(self, write: Write, kept: Sequence[int]) -> None:
        sealed = self._sealed.pop(write)
        wanted = self._cut([(number, write.claims[number].name.page_hash) for number in kept])
        write.num_left = len(wanted)
        for some in wanted:
            values = [value for number in some.positions if (value := sealed[number]) is not None]
            # Nobody waits for a put, so it may begin late; what waits is bounded by `writing_bytes`.
            self._calls.submit(
                PUT, partial(self._put, some, values), partial(self._was_put, write, some), may_wait=True
            )
        if not wanted:
            self._tell(partial(self._over, write))

    @override
    def _release(self, write: Write, number: int) -> None:
        self._putting.discard(write.claims[number].name.page_hash)

    def _seal(self, write: Write) -> None:
        """In the thread for copies: the only one that reads a pool's memory."""
        sealed: list[memoryview | None] = []
        for claim, page in zip(write.claims, write.pages, strict=True):
            try:
                sealed.append(self._values.seal(claim.name.page_hash, page))
            except ValueError:
                # A view that was released: its pool was closed meanwhile.
                sealed.append(None)
        self._tell(partial(self._was_sealed, write, sealed))

    def _was_sealed(self, write: Write, sealed: list[memoryview | None]) -> None:
        self._sealed[write] = sealed
        # What is put may take seconds, and the pool's memory is not needed for it.
        write.pages, write.reads_memory = (), False
        self._over(write)

    def _put(self, some: _Wanted, values: Sequence[memoryview]) -> list[bool]:
        """In a call's thread."""
        return truths(self._store.put(list(some.hashes), list(values)), len(values))

    def _was_put(self, write: Write, some: _Wanted, kept: list[bool] | None) -> None:
        for index, (position, page_hash) in enumerate(zip(some.positions, some.hashes, strict=True)):
            if kept is None or not kept[index]:
                self._not_stored(write, position, WRITE_FAILED)
                continue
            self._putting.discard(page_hash)
            self._known.number(page_hash)
            self._stored(write, position)
        write.num_left -= 1
        if not write.num_left:
            self._over(write)

    # inside

    @override
    def _tell(self, work: Callable[[], None]) -> None:
        self._to_do.append(work)
        self._calls.tell()

    def _cut(self, pages: Sequence[tuple[int, bytes]]) -> list[_Wanted]:
        size = self._call_pages
        batches = [pages[at : at + size] for at in range(0, len(pages), size)]
        return [_Wanted([number for number, _ in some], [one for _, one in some]) for some in batches]
