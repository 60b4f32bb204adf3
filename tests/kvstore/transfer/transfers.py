"""What tests of transports share: pools whose pages run, mail between two agents, and the judge of property tests."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import TransferError
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, MemoryHost, PagePool, PoolInfo
from kvstore.protocol import OfferPair, PagesSent, PoolHandle, SendPages
from kvstore.transfer.base import Transfer
from kvstore.transfer.plan import Descriptor
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import StartCopy
from tests.kvstore.fake_devices import FakeCards, Process

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4)
SIZE = LAYOUT.page_bytes
NUM_PAGES = 9
NEVER = 1e9
DEVICE = "cuda:0"
OUTSIDE = [
    Descriptor(*part)
    for part in ((0, 0, 0), (-1, 0, 4), (0, -1, 4), (NUM_PAGES * SIZE - 3, 0, 4), (0, NUM_PAGES * SIZE - 3, 4))
]
"""Parts that are empty, or of bytes that are no pool's."""


def make_pool(host: MemoryHost, group: str, device: str = "cpu", incarnation: int = 1, name: str = "") -> PagePool:
    """All its pages run, page number n under generation 100 + n."""
    info = PoolInfo(group=group, num_pages=NUM_PAGES, layout=LAYOUT, incarnation=incarnation, device=device)
    pool = host.create(name or f"kv-{group}", info)
    for page in range(1, NUM_PAGES):
        pool.table().write(page, PageEntry(PageState.RUNNING, generation=100 + page))
    return pool


class Stranger:
    """A pool that another transport has reached."""

    def __init__(self, pair: Any) -> None:
        self.info, self.transport = pair.peer.info, pair.transport

    def generations(self, pages: list[int]) -> list[int]:
        return [100 + page for page in pages]


def pulling(pair: Any) -> PagePuller:
    puller = PagePuller(pair.transport)
    puller.add("d", [pair.destination])
    return puller


def start_copy(copy_id: int = 1, pages: tuple[int, ...] = (2, 3, 5), targets: tuple[int, ...] = (4, 5, 1)) -> StartCopy:
    return StartCopy(
        copy_id, list(pages), [100 + page for page in pages], list(targets), [100 + page for page in targets], NEVER
    )


Post = deque[tuple[Callable[[], None], Callable[[], None]]]
"""Messages on their way, each with what happens if it is lost."""


class World:
    """Two agents, the mail between them, devices and time. A test puts its own kind of agents in."""

    near: Any
    far: Any

    def __init__(self) -> None:
        self.now = 0.0
        self.cards = FakeCards()
        self.post: Post = deque()

    def deliver(self, num_messages: int = 1000) -> None:
        while self.post and num_messages:
            num_messages -= 1
            self.post.popleft()[0]()

    def poll(self) -> list[Transfer]:
        self.far.transport.poll(self.now)
        return self.near.transport.poll(self.now)

    def settle(self, num_rounds: int = 20) -> dict[Transfer, str]:
        """Deliver and poll; the error of each transfer that has ended, empty if it has none."""
        ended: list[Transfer] = []
        for _ in range(num_rounds):
            self.deliver()
            ended += self.poll()
        assert len(set(ended)) == len(ended)
        return {one: one.error.code if one.error else "" for one in ended}

    def end_of(self, transfer: Transfer) -> str:
        """Deliver and poll until this one has ended, and no other: its error."""
        ended = self.settle()
        assert list(ended) == [transfer]
        return ended[transfer]


class Mail(Process):
    """An agent's process and its `ControlChannel`, by post; `inbox` is what takes what comes."""

    def __init__(self, world: World, name: str, inbox: Any) -> None:
        super().__init__(HeapHost(), world.cards)
        self.world, self.name, self.inbox = world, name, inbox
        self.offered: list[str] = []

    def now(self) -> float:
        return self.world.now

    def handle(self, group: str = "p", device: str = DEVICE) -> PoolHandle:
        whole = {"num_pages": NUM_PAGES, "layout": LAYOUT, "incarnation": 1}
        return PoolHandle(group=group, agent=self.name, path="/of/another/host", device=device, **whole)

    def _send(self, message: Callable[[], None], pair: str) -> None:
        self.world.post.append((message, lambda: self.inbox.pair_failed(pair, "deadline_exceeded", "lost")))

    def offer(self, agent: str, offer: OfferPair) -> None:
        self.offered.append(offer.pair)

        def ask() -> None:
            try:
                getattr(self.world, agent).inbox.take_offer(self.name, offer)
            except TransferError as error:
                self.inbox.pair_failed(offer.pair, error.code, error.message)

        self._send(ask, offer.pair)

    def order(self, agent: str, order: SendPages) -> None:
        def answer(sent: PagesSent) -> None:
            self._send(lambda: self.inbox.sent(sent), order.pair)

        self._send(lambda: getattr(self.world, agent).inbox.take_order(self.name, order, answer), order.pair)

    def close(self, agent: str, pair: str) -> None:
        tell = lambda: getattr(self.world, agent).inbox.pair_failed(pair, "pair_aborted", "closed")  # noqa: E731
        self.world.post.append((tell, lambda: None))


class Judge:
    """Every transfer ends once, with the bytes it was asked for, and writes nothing afterwards.

    `found` and `wanted` give the bytes of the pages that a transfer writes, by what it is asked for: one per page.
    """

    def __init__(self, found: Callable[[int], bytes], wanted: Callable[[int], bytes]) -> None:
        self._found, self._wanted = found, wanted
        self.targets: dict[Transfer, list[int]] = {}
        self.ended: set[Transfer] = set()
        self._frozen: dict[int, bytes] = {}

    def free(self, pages: Iterable[int]) -> list[int]:
        """Those that no transfer writes: a page is granted to one at a time, as in the agent."""
        busy = {page for one, targets in self.targets.items() if one not in self.ended for page in targets}
        free = [page for page in pages if page not in busy]
        for page in free:
            self._frozen.pop(page, None)
        return free

    def take(self, ended: Iterable[Transfer]) -> None:
        for one in ended:
            assert one not in self.ended
            self.ended.add(one)
            for page in self.targets[one]:
                self._frozen[page] = self._found(page)
                assert one.error is not None or self._frozen[page] == self._wanted(page)

    def check(self) -> None:
        for page, content in self._frozen.items():
            assert self._found(page) == content, "written after its end"

    def cancelled(self, number: int) -> list[Transfer]:
        """Transfer number `number`, from 1, if there is one."""
        return list(self.targets)[number - 1 : number]
