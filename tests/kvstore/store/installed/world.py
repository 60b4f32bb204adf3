"""An unruly store behind `InstalledPages`, on a clock of its own: threads are steps drawn from a seed, and may hang.

Whatever happens, a page that is read is right, memory that is read into has that page or nothing, and nothing is waited
for beyond its deadlines.
"""

import random
from collections import Counter
from collections.abc import Callable

from kvstore.store.index import PageName
from kvstore.store.installed.calls import MOST_ABANDONED, BoundedCalls
from kvstore.store.installed.installed_pages import THREADS, CallLimits, InstalledPages
from kvstore.store.interface import Stored
from kvstore.store.lanes import Lane
from kvstore.store.operations import Read, Write
from tests.kvstore.store.faulty_files import SteppedLane
from tests.kvstore.store.installed.unruly import PAGE, VALUES, UnrulyStore, page_of
from tests.kvstore.store.pages import chain

DEADLINE_S = 5.0
LIMITS = CallLimits(call_pages=3, reading_bytes=24 * PAGE, writing_bytes=24 * PAGE, num_known=20)


class SteppedThread(Lane):
    """One thread of a store: what it does waits until the world steps it, some of it for ever."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.work: Callable[[], None] | None = None
        self.may_end_at = 0.0

    def submit(self, work: Callable[[], None]) -> None:
        assert self.work is None, "one call at a time"
        self.work = work
        self.may_end_at = self.world.now + self.world.takes_s()

    def close(self) -> None:
        self.world.left.append(self)

    def step(self) -> None:
        work, self.work = self.work, None
        assert work is not None
        work()


class World:
    """See the module. `counts` says what came."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.hangs = self.draw.choice((0.0, 0.0, 0.02, 0.2))
        self.is_busy = not self.draw.randrange(4)
        self.slow_s = self.draw.choice((0.0, 0.01, 2.0))
        self.store = UnrulyStore(self.draw, self.draw.choice((0.0, 0.05, 0.05, 0.3)))
        self.threads: list[SteppedThread] = []
        self.left: list[SteppedThread] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.is_woken = False
        self.copying = SteppedLane()
        self.calls = BoundedCalls(
            THREADS, DEADLINE_S, lambda: self.now, self.later, self.wake, self.make_thread, told=self
        )
        self.pages = InstalledPages(self.store, VALUES, PAGE, self.calls, self.copying, LIMITS)
        self.names: dict[bytes, PageName] = {}
        self.asked: dict[int, float] = {}
        self.found: list[tuple[list[bytes], Stored]] = []
        self.reads: dict[Read, tuple[list[bytes], float]] = {}
        self.writes: dict[Write, list[bool]] = {}
        self.counts: Counter[str] = Counter()

    # what it stands in for

    def takes_s(self) -> float:
        if self.draw.random() < self.hangs:
            self.counts["hung"] += 1
            return self.draw.choice((DEADLINE_S, 3 * DEADLINE_S, 1e9))
        return self.draw.uniform(0.0, self.slow_s)

    def make_thread(self, name: str) -> SteppedThread:
        thread = SteppedThread(self, name)
        self.threads.append(thread)
        return thread

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        # A moment later, as by a loop's clock: what is exactly due may not be yet, in numbers of this size.
        self.timers.append((self.now + delay_s + 1e-9, work))

    def wake(self) -> None:
        self.is_woken = True

    # the event that `wait` waits for: here time passes, and threads work
    def set(self) -> None:
        self.is_woken = True

    def clear(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        steps = [thread for thread in self.threads if thread.work is not None]
        at = min((max(thread.may_end_at, self.now) for thread in steps), default=1e9)
        if self.copying.waiting:
            self.copying.step()
        elif timeout is None or at <= self.now + timeout:
            assert at < 1e9, "it waits for what never comes"
            self.now = at
            self.step()
        else:
            self.now += timeout + 1e-9
        return True

    # what is done

    def prompt(self) -> list[PageName]:
        names = chain(self.draw.randrange(5), self.draw.randint(1, 9))
        self.names.update((name.page_hash, name) for name in names)
        return names

    def find(self) -> None:
        prompts = [[name.page_hash for name in self.prompt()] for _ in range(self.draw.randrange(3))]
        number = len(self.asked) + self.counts["answered"]
        self.asked[number] = self.now

        def answer(stored: list[Stored]) -> None:
            assert self.now - self.asked.pop(number) <= 2 * DEADLINE_S + 1e-6, "an answer that is waited for too long"
            self.counts["answered"] += 1
            for prompt, one in zip(prompts, stored, strict=True):
                assert len(one.slots) == len(one.sequences) <= len(prompt)
                self.found.append((prompt, one))

        self.pages.find(prompts, answer)

    def read(self) -> None:
        if not self.found:
            return
        hashes, stored = self.found.pop(self.draw.randrange(len(self.found)))
        hashes = hashes[: len(stored.slots)]
        pages = [[memoryview(bytearray(PAGE // 2)) for _ in range(2)] for _ in hashes]
        read = self.pages.read(stored.slots, stored.sequences, pages)
        if read is not None:
            self.reads[read] = hashes, self.now

    def write(self) -> None:
        names = self.prompt()
        whole = [bytearray(page_of(name.page_hash)) for name in names]
        pages = [[memoryview(one)[: PAGE // 2], memoryview(one)[PAGE // 2 :]] for one in whole]
        if self.pages.must_wait(len(names)):
            return
        write = self.pages.begin_write(names, pages)
        if write is None:
            return
        good = [True] * len(write.claims)
        if self.draw.random() < 0.3:
            # The pool's page is used for something else while it is copied.
            changed = self.draw.randrange(len(good))
            good[changed] = False
            whole[write.positions[changed]][:] = page_of(bytes(range(16)))
        self.writes[write] = good

    def step(self) -> None:
        may = [thread for thread in self.threads if thread.work is not None and thread.may_end_at <= self.now]
        if may:
            self.draw.choice(may).step()

    def copy(self) -> None:
        if self.copying.waiting:
            self.copying.step()

    def cancel(self) -> None:
        if self.reads:
            self.draw.choice(list(self.reads)).is_needed = False

    def steps(self) -> list[tuple[float, Callable[[], None]]]:
        """Threads whose work ends while time passes; on a busy machine it ends when it is looked at."""
        return [(one.may_end_at, one.step) for one in self.threads if one.work is not None and not self.is_busy]

    def settle(self) -> None:
        """Copies take no time, and whoever is woken polls at once."""
        while self.copying.waiting or self.is_woken:
            self.copying.close()
            self.poll()

    def pass_time(self, most_s: float = DEADLINE_S) -> None:
        self.settle()
        end, num_now = self.now + self.draw.uniform(0.0, most_s), 0
        while (due := min((*self.timers, *self.steps()), key=lambda one: one[0], default=None)) and due[0] <= end:
            if due in self.timers:
                self.timers.remove(due)
            num_now = num_now + 1 if due[0] <= self.now + 1e-6 else 0
            assert num_now < 1000, "it is woken again and again"
            self.now = max(self.now, due[0])
            due[1]()
            self.settle()
        self.now = end
        self.check_ages()

    def poll(self) -> None:
        self.is_woken = False
        for ended in self.pages.poll():
            if isinstance(ended, Read):
                self.check_read(ended, *self.reads.pop(ended))
            elif ended.is_written:
                del self.writes[ended]
                self.counts["stored"] += sum(ended.is_stored)
            else:
                assert not ended.reads_memory
                self.pages.commit(ended, self.writes[ended])

    def check_read(self, read: Read, hashes: list[bytes], begun: float) -> None:
        # Two calls at a time, each of which may wait for others and then run.
        most = 2 * DEADLINE_S * (1 + len(hashes))
        assert self.now - begun <= most + 1e-6, "a read that is waited for too long"
        for page_hash, page, outcome in zip(hashes, read.pages, read.outcomes, strict=True):
            found = b"".join(page)
            if outcome:
                assert found in (page_of(page_hash), bytes(PAGE)), "memory of a pool has another page"
            else:
                assert found == page_of(page_hash), "a wrong page is restored"
            self.counts[outcome or "right"] += 1

    def check_ages(self) -> None:
        for asked in self.asked.values():
            assert self.now - asked <= 2 * DEADLINE_S + 1e-6, "nobody is answered for too long"
        hung = [thread for thread in self.left if thread.work is not None]
        assert len(hung) <= MOST_ABANDONED + sum(THREADS.values()), "more threads are lost than may be"

    def end(self) -> None:
        """All that was begun ends; then it is closed."""
        for _ in range(1000):
            if not (self.reads or self.writes or self.asked):
                break
            for work in (self.copy, self.step, self.poll, lambda: self.pass_time(DEADLINE_S)):
                work()
        assert not [*self.reads, *self.writes, *self.asked], "something never ends"
        begun, num_calls = self.now, self.store.num_calls
        self.pages.close()
        assert self.now - begun <= 2 * DEADLINE_S + 1e-6, "its end is waited for too long"
        assert self.store.num_calls - num_calls <= 1 + sum(THREADS.values())
        self.counts["closed"] += self.store.num_closed


def run(seed: int) -> World:
    """Raises AssertionError if something is wrong."""
    world = World(seed)
    works = [world.find, world.read, world.read, world.write, world.cancel, world.store.scribble]
    works += [world.step, world.copy, world.poll] * 4
    for _ in range(400):
        if world.draw.random() < 0.2:
            world.pass_time(world.draw.choice((0.01, 1.0, 2 * DEADLINE_S)))
        world.draw.choice(works)()
        if world.pages.why_off and not world.counts["off"]:
            world.counts["off"] = 1
    world.end()
    world.counts += world.store.counts
    return world
