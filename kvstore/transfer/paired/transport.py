"""Moves pages between agents that do not map each other's pools: a pair for each two of them, over NCCL or TCP.

The destination's agent makes the pair (rank 0), receives, and is the only one that writes into its pool, as with every
transport; the source's agent (rank 1) sends what it is ordered to. Page tables of other hosts cannot be read, so the
source compares generations before and after it sends; a transfer is complete when its bytes and that report are in.

`pair.py` decides, a `LinkMaker` (`nccl.py`, `tcp/link.py`) moves bytes, `ControlChannel` carries messages. The operator
chooses this transport. If a pair cannot be made, its transfers end with PairUnmade; `selection.py` decides what
follows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, assert_never

from kvstore.errors import DeviceError, DeviceFault, KVError, PairUnmade, TransferError
from kvstore.pool.device import CPU
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import OfferPair, PagesSent, PoolHandle, SendPages
from kvstore.transfer.base import Peer, Transfer, Transport
from kvstore.transfer.paired.link import Broken, LinkMaker, Memory, Moved, PairLink, Ready, Stopped
from kvstore.transfer.paired.orders import ControlChannel, RemotePeer, Reply, compare_generations, fits, sent_answer
from kvstore.transfer.paired.pair import PAIR_ABORTED, Abort, Command, Finished, Initialise, Pair, PairPhase, Run

SOURCE_FAILED: Final = "source_failed"
_MAX_PAIRS: Final = 64
"""A pair over TCP may take 16 threads and sockets here, 64 pairs 1,024. A mesh has one for each two agents."""
_PAUSE_S: Final = 0.001
"""About as long as a page of 2 MiB over the network (0.8 ms at 2.6 GB/s); 1,000 polls a second cost little."""
# Parts of one order: splitting them up is work for the agent's loop.
_MAX_PARTS: Final = 1 << 16


class _Half(NamedTuple):
    """One half of a pair; `agent` is at the other end. A half that receives has `devices`: source's, destination's."""

    name: str
    agent: str
    state: Pair
    link: PairLink
    devices: tuple[str, str] | None = None


class _Receipt(NamedTuple):
    """A transfer into a pool of this agent."""

    half: _Half
    transfer: Transfer
    memory: Memory
    parts: list[tuple[int, int]]
    order: SendPages


class _Sending(NamedTuple):
    """A transfer out of a pool of this agent."""

    order: SendPages
    memory: Memory
    parts: list[tuple[int, int]]
    reply: Reply


class PairTransport(Transport):
    """Moves pages between pools of different agents. The engine, `links`, gives it its name and kinds of memory."""

    def __init__(self, links: LinkMaker, channel: ControlChannel, init_timeout_s: float = 20.0) -> None:
        self.name = links.name
        self.kinds = links.kinds
        self._links = links
        self._channel = channel
        self._init_timeout_s = init_timeout_s
        # Pools that are sent to others, by group and rank.
        self._sources: dict[tuple[str, int], PagePool] = {}
        # In both roles, by the pair's name.
        self._halves: dict[str, _Half] = {}
        self._receipts: dict[int, _Receipt] = {}
        self._sendings: dict[tuple[str, int], _Sending] = {}
        self._ended: list[Transfer] = []
        self._failure = ""
        self._num_orders = 0
        self._num_pairs = 0
        self._num_idle = 0
        channel.attach(self)

    def open(self, wake: Callable[[], None]) -> str:
        return self._links.open(wake)

    @property
    def num_posted(self) -> int:
        """Counts sends to others too, and pairs that are being made or given up."""
        # Otherwise the agent's loop would stop polling while another agent waits for what it was promised.
        return len(self._ended) + sum(half.state.is_busy for half in self._halves.values())

    @property
    def pause_s(self) -> float:
        return 0.0 if self._num_idle < self._links.eager_polls else _PAUSE_S

    @property
    def refused(self) -> Mapping[str, int]:
        return self._links.refused

    @property
    def device_failure(self) -> str:
        """A failure seen while sending; one seen while receiving ends the transfer with its code."""
        return self._failure

    def register(self, pool: PagePool) -> None:
        """The pool can also be sent from, instead of an earlier one of its group and rank. Raises PagesElsewhere."""
        self.require_kind(pool.info.device, pool.path)
        # By group: a pool that was made again replaces the earlier one, so orders for the old incarnation do not match.
        self._sources[pool.info.group, pool.info.layout.tp_rank] = pool

    def connect(self, handle: PoolHandle) -> RemotePeer:
        """Contacts nobody yet. Raises PagesElsewhere if this engine cannot move the pool's memory."""
        self.require_kind(handle.device, f"{handle.group} at {handle.agent}")
        return RemotePeer(handle, self)

    def disconnect(self, peer: Peer) -> None:
        """The pair stays for the agent's other pools, until the agent is lost."""
        gone = TransferError("source_lost", f"the pool of {peer.info.group} was disconnected")
        for number, receipt in list(self._receipts.items()):
            if receipt.transfer.peer is peer:
                self._perform(receipt.half, receipt.half.state.cancel(number, gone))

    def post(self, transfer: Transfer) -> None:
        """The deadline also bounds how long the sender tries. Also raises PairUnmade."""
        peer, source = transfer.peer, transfer.source
        if not isinstance(peer, RemotePeer) or source is None:
            raise TransferError("unsupported", f"{self.name} only reads announced pages of pools that it has reached")
        transfer.require_inside()
        memory = _memory_of(transfer.pool)
        half = self._half_to(peer, transfer.pool.info.device)
        self._num_orders += 1
        order = SendPages(
            pair=half.name,
            number=self._num_orders,
            group=peer.info.group,
            incarnation=peer.info.incarnation,
            offsets=[part.remote_offset for part in transfer.parts],
            sizes=[part.num_bytes for part in transfer.parts],
            pages=list(source.pages),
            generations=list(source.generations),
            # Seconds left, since the other host has another clock. Never 0, which would be a deadline that has passed.
            timeout_s=max(0.001, transfer.deadline - self._channel.now()),
            rank=peer.info.layout.tp_rank,
        )
        parts = [(part.local_offset, part.num_bytes) for part in transfer.parts]
        self._receipts[order.number] = _Receipt(half, transfer, memory, parts, order)
        self._num_idle = 0
        self._perform(half, half.state.queue(order.number, transfer.deadline))

    def poll(self, now: float) -> list[Transfer]:
        before = len(self._ended)
        for half in list(self._halves.values()):
            for news in half.link.news():
                self._num_idle = 0
                match news:
                    case Ready():
                        self._perform(half, half.state.initialised())
                    case Moved(number):
                        self._perform(half, half.state.moved(number))
                    case Broken(message, code):
                        if code == DeviceFault.code:
                            self._failure = self._failure or message
                        self._perform(half, half.state.fail(message, code))
                    case Stopped():
                        self._perform(half, half.state.stopped())
                    case _:
                        assert_never(news)
            self._perform(half, half.state.tick(now))
            # Forgotten only now: until its engine had stopped, it might have written pages.
            if half.state.phase is PairPhase.ABORTED:
                del self._halves[half.name]
        self._num_idle = 0 if before else self._num_idle + 1
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, transfer: Transfer) -> None:
        """A running transfer is waited for: the other end is sending it."""
        cancelled = TransferError("cancelled", "the transfer was cancelled")
        for number, receipt in list(self._receipts.items()):
            if receipt.transfer is transfer:
                self._perform(receipt.half, receipt.half.state.cancel(number, cancelled))

    def drain(self) -> list[Transfer]:
        for half in list(self._halves.values()):
            cancelled = TransferError("cancelled", "the transfer was cancelled")
            for number in [number for number, receipt in self._receipts.items() if receipt.half is half]:
                self._perform(half, half.state.cancel(number, cancelled))
            # In this thread, unlike an abort: the caller frees the memory next.
            if half.state.phase is not PairPhase.ABORTED:
                half.state.fail("this agent is stopping")
                half.link.stop()
                self._channel.close(half.agent, half.name)
                self._perform(half, half.state.stopped())
        self._halves.clear()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self.drain()
        self._links.close()
        self._sources.clear()

    # what other agents say

    def take_offer(self, agent: str, offer: OfferPair) -> None:
        pool = self._source(offer.group, offer.incarnation, offer.rank)
        if offer.layout_digest != pool.layout.digest:
            raise TransferError(
                "layout_mismatch", f"the pool of {offer.group} does not have the layout that {agent} expects"
            )
        # An offer is repeated until it is answered, so it may come twice.
        if offer.pair in self._halves:
            return
        self._require_room()
        try:
            link = self._links.link(pool.info.device, offer.unique_id, 1)
        except DeviceError as error:
            raise TransferError(error.code, error.message) from None
        half = self._halves[offer.pair] = _Half(offer.pair, agent, Pair(is_receiver=False), link)
        self._num_idle = 0
        self._perform(half, half.state.start(self._channel.now() + offer.timeout_s))

    def withdraw(self, group: str) -> None:
        self._sources = {key: pool for key, pool in self._sources.items() if key[0] != group}

    def is_sending(self, group: str) -> bool:
        return any(sending.order.group == group for sending in self._sendings.values())

    def take_order(self, agent: str, order: SendPages, reply: Reply) -> None:
        half = self._halves.get(order.pair)
        try:
            # `agent` is checked: a pair's name is no secret, and only the agent that offered the pair may order pages.
            if half is None or half.agent != agent or (order.pair, order.number) in self._sendings:
                raise TransferError(
                    PAIR_ABORTED, f"{agent} has no pair {order.pair} here, or ordered transfer {order.number} before"
                )
            pool = self._source(order.group, order.incarnation, order.rank)
            parts = list(zip(order.offsets, order.sizes, strict=False))
            # Checked, although the other end is an agent of ours: a wrong offset would send other memory of this
            # process.
            is_sound = len(order.offsets) == len(order.sizes) <= _MAX_PARTS
            if not is_sound or not fits(parts, pool.info):
                raise TransferError(
                    "bad_descriptor",
                    f"the order has empty parts, parts outside the pool, more than {_MAX_PARTS} parts, or not as many "
                    "offsets as sizes",
                )
            # Rank 0's page table describes the pages of all ranks.
            compare_generations(self._source(order.group, order.incarnation), order, "before")
            memory = _memory_of(pool)
        except KVError as error:
            if error.code == DeviceFault.code:
                self._failure = self._failure or error.message
            reply(sent_answer(order, error, is_sent=False))
            return
        self._sendings[order.pair, order.number] = _Sending(order, memory, parts, reply)
        self._num_idle = 0
        self._perform(half, half.state.queue(order.number, self._channel.now() + order.timeout_s))

    def knows(self, pair: str) -> bool:
        return pair in self._halves

    def sent(self, answer: PagesSent) -> None:
        receipt = self._receipts.get(answer.number)
        if receipt is not None and receipt.half.name == answer.pair:
            error = TransferError(_foreign(answer.code), answer.message) if answer.code else None
            commands = receipt.half.state.source_verified(answer.number, error, is_sent=answer.is_sent)
            self._perform(receipt.half, commands)

    def pair_failed(self, pair: str, code: str, why: str) -> None:
        half = self._halves.get(pair)
        if half is not None:
            self._perform(half, half.state.fail(why, _foreign(code)))

    def agent_lost(self, agent: str) -> None:
        for half in list(self._halves.values()):
            if half.agent == agent:
                self._perform(half, half.state.fail(f"{agent} is gone", "source_lost"))

    # inside

    def _half_to(self, peer: RemotePeer, device: str) -> _Half:
        # By devices, not by pool: connecting may take up to `init_timeout_s` (20 s); an agent's pools share the pair.
        devices = peer.info.device, device
        for known in self._halves.values():
            if (known.agent, known.devices) == (peer.agent, devices) and not known.state.is_over:
                return known
        self._require_room()
        try:
            unique_id = self._links.unique_id()
            link = self._links.link(device, unique_id, 0)
        except KVError as error:
            raise PairUnmade(error.code, error.message) from None
        self._num_pairs += 1
        # Unique over all agents and incarnations: both ends use this name, and late messages for an old one match none.
        name = f"{self._channel.name}/{self.name}/{self._num_pairs}"
        half = self._halves[name] = _Half(name, peer.agent, Pair(is_receiver=True), link, devices)
        offer = OfferPair(
            pair=name,
            unique_id=unique_id,
            group=peer.info.group,
            incarnation=peer.info.incarnation,
            layout_digest=peer.info.layout.digest,
            timeout_s=self._init_timeout_s,
            transport=self.name,
            rank=peer.info.layout.tp_rank,
        )
        self._channel.offer(peer.agent, offer)
        self._perform(half, half.state.start(self._channel.now() + self._init_timeout_s))
        return half

    def _perform(self, half: _Half, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Initialise():
                    half.link.begin()
                case Run(number):
                    self._run(half, number)
                case Abort():
                    half.link.abort()
                    self._channel.close(half.agent, half.name)
                case Finished(number, error):
                    self._finish(half, number, error)
                case _:
                    assert_never(command)

    def _run(self, half: _Half, number: int) -> None:
        # Keyed with the pair: the receiver assigns numbers, and two receivers use the same ones.
        sending = self._sendings.get((half.name, number))
        if sending is not None:
            half.link.move(number, sending.memory, sending.parts)
            return
        receipt = self._receipts[number]
        # Receives are posted before the order leaves, so that the first bytes find them.
        half.link.move(number, receipt.memory, receipt.parts)
        self._channel.order(half.agent, receipt.order)

    def _finish(self, half: _Half, number: int, error: TransferError | None) -> None:
        sending = self._sendings.pop((half.name, number), None)
        if sending is None:
            receipt = self._receipts.pop(number)
            receipt.transfer.error = error
            # All or nothing: an engine does not say how far a failed transfer got.
            receipt.transfer.num_bytes = 0 if error else sum(receipt.order.sizes)
            self._ended.append(receipt.transfer)
            return
        # Independent of the comparison below: pages that turn out stale were still sent, and the pair goes on.
        is_sent = error is None
        if error is None:
            try:
                compare_generations(
                    self._source(sending.order.group, sending.order.incarnation), sending.order, "after"
                )
            except KVError as problem:
                error = TransferError(problem.code, problem.message)
        sending.reply(sent_answer(sending.order, error, is_sent=is_sent))

    def _require_room(self) -> None:
        if len(self._halves) >= _MAX_PAIRS:
            raise TransferError("too_many_pairs", f"this agent has {_MAX_PAIRS} pairs of {self.name} already")

    def _source(self, group: str, incarnation: int, rank: int = 0) -> PagePool:
        pool = self._sources.get((group, rank))
        if pool is None:
            raise TransferError("unknown_group", f"there is no pool of group {group!r} here that {self.name} can move")
        if pool.info.incarnation != incarnation:
            raise TransferError("source_changed", f"the pool of {group} was recreated")
        return pool


def _foreign(code: str) -> str:
    """The other end's error code as a code of this end: a device that failed there is not a device of this one."""
    return SOURCE_FAILED if code == DeviceFault.code else code


def _memory_of(pool: PagePool) -> Memory:
    """The pool's pages in this process. Raises TransferError if it was closed or its device has failed."""
    try:
        return pool.pages_view if pool.info.device == CPU else pool.device_pages
    except KVError as error:
        raise TransferError(error.code, error.message) from None
