"""An in-memory network on virtual time with seeded faults: whole meshes in one process, every run repeatable.

Owns every endpoint, connection and message in flight of one simulation. Tests make one `SimulatedNetwork`, pass
`network.transport(address)` to each `ActorSystem`, and cut, crash or hang actors through the network.

Guarantees, whatever the faults: messages of one connection and channel arrive in the order they were sent, less those
lost; a duplicate arrives after its original, possibly much later; messages of different connections overtake each
other freely; nothing arrives on a link after its `on_link_down`. Each connection, direction and channel has its own
random generator, seeded by names and never by hash order, so that a change in one conversation leaves the faults of the
others unchanged.

A hung actor's callbacks are withheld and its messages wait, as if it were stopped; its own timers still run, since they
belong to the loop.
"""

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mesh.address import Address, Endpoint
from mesh.errors import BindError
from mesh.simulation.connection import Connection, End, Frames, Pipe
from mesh.simulation.faults import Cut, Faults, RandomCuts
from mesh.simulation.trace import Trace, TraceEntry
from mesh.transport.base import Buffer, Channel, Link, Listener


class SimulatedNetwork:
    """The network of one simulation. Not thread-safe; lives on one event loop, usually a `VirtualTimeLoop`.

    `outbox_limit` bounds the messages in flight per connection, direction and channel; `trace_limit` bounds what
    `trace` keeps; `counts` has one number per fault class; `trace.fingerprint` digests all messages and their times,
    and is equal for equal runs; `describe` puts a message's frames into words for `report`.
    """

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        outbox_limit: int = 1000,
        trace_limit: int = 2000,
        describe: Callable[[Frames], str] | None = None,
    ) -> None:
        self.seed = seed
        self.faults = faults or Faults()
        self.outbox_limit = outbox_limit
        self.trace = Trace(trace_limit, describe)
        self.counts = self.trace.counts
        self._cuts: list[Cut] = []
        self._random_cuts = RandomCuts(seed)
        self._ends: dict[Address, End] = {}
        self._listening: dict[str, End] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._connections: dict[tuple[Address, Address], int] = {}
        self._armed_for: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Messages in flight belong to no process: they arrive whatever has become of their sender.
        self._context = contextvars.copy_context()

    def transport(self, address: Address, place: str = "") -> "SimulatedTransport":
        """At an endpoint of its own, or at `place`, which can be reused. Raises ValueError if `address` has one."""
        if address in self._ends:
            raise ValueError(f"{address} already has a transport; a restarted actor needs a new epoch")
        self._ends[address] = End(address)
        return SimulatedTransport(self, self._ends[address], place or str(address))

    def cut(
        self,
        left: Iterable[str],
        right: Iterable[str],
        *,
        duration_s: float = float("inf"),
        hold: bool = False,
        one_way: bool = False,
    ) -> None:
        """Cut every actor id of `left` off from every one of `right`, from now on.

        `hold`: messages arrive when the cut ends, as over TCP, instead of never. `one_way`: messages from `right` still
        reach `left`.
        """
        if hold and duration_s == float("inf"):
            raise ValueError("messages can only be held for a cut of finite duration")
        self._cuts.append(Cut(frozenset(left), frozenset(right), self.now() + duration_s, hold, one_way))

    def sever(self, left: Iterable[str], right: Iterable[str]) -> None:
        """Break all connections between these actor ids: both ends are told, as if by transport heartbeats."""
        parted = Cut(frozenset(left), frozenset(right), float("inf"), hold=False, one_way=False)
        for end in list(self._ends.values()):
            for link, connection in list(end.links.items()):
                if parted.parts(end.address.actor_id, link.peer.actor_id):
                    self._push(self.now(), self._down, (end, link, connection, "no heartbeat"))

    def heal(self) -> None:
        self._cuts.clear()

    def is_cut(self, sender: str, receiver: str) -> bool:
        return self._find_cut(sender, receiver, self.now()) is not None

    def calm(self) -> None:
        self.faults = Faults(latency_s=self.faults.latency_s, detection_s=self.faults.detection_s)
        self.heal()

    def crash(self, address: Address) -> None:
        """It sends and receives nothing more; peers learn of it after `detection_s`. The caller stops its system."""
        end = self._ends[address]
        if end.state == "crashed":
            return
        self._note("crash", str(address), "", "")
        self.close_end(end, "crashed")
        for link, connection in list(end.links.items()):
            self._end_far_side(connection, link, "peer crashed", self.now() + self.faults.detection_s)
        end.links.clear()

    def bury(self, address: Address) -> None:
        del self._ends[address]

    def hang(self, address: Address) -> None:
        end = self._ends[address]
        if not end.hung:
            end.hung = True
            self._note("hang", str(address), "", "")

    def resume(self, address: Address) -> None:
        end = self._ends[address]
        if not end.hung:
            return
        end.hung = False
        self._trace("resume", str(address), "", "")
        withheld, end.withheld = end.withheld, []
        # Under their old numbers, so that they come before what is sent from now on.
        for number, handler, arguments in withheld:
            self._push(self.now(), handler, arguments, number)
        unsent, end.unsent = end.unsent, []
        for pipe, frames in unsent:
            self.transmit(pipe, frames)

    def report(self, last: int = 100) -> str:
        return f"seed {self.seed}, the last {last} messages:\n{self.trace.report(last)}"

    def now(self) -> float:
        """The loop's clock; 0 before the first actor starts."""
        return self._loop.time() if self._loop is not None else 0.0

    # The methods below are for SimulatedTransport.

    def listen(self, end: End, endpoint: Endpoint) -> None:
        if endpoint.control in self._listening:
            raise BindError(f"{endpoint.control} is already bound: stop the actor that holds it first")
        self._loop = asyncio.get_running_loop()
        self._listening[endpoint.control] = end

    def close_end(self, end: End, state: str) -> None:
        end.close(state)
        for name in [name for name, other in self._listening.items() if other is end]:
            del self._listening[name]

    def connect(self, dialer: End, link: Link, endpoint: Endpoint) -> Connection:
        """Connect to the actor that listens at `endpoint`; if there is none, the dialer is told after `detection_s`."""
        acceptor = self._listening.get(endpoint.control)
        pair = (dialer.address, link.peer)
        number = self._connections[pair] = self._connections.get(pair, 0) + 1
        connection = Connection(dialer, acceptor, link.peer, f"{self.seed}/{dialer.address}>{link.peer}/{number}")
        if acceptor is None:
            self._push(self.now() + self.faults.detection_s, self._down, (dialer, link, connection, "refused"))
        else:
            connection.accepted_at = self.now() + self.faults.latency_s[0]
            self._push(connection.accepted_at, self._accept, (acceptor, connection))
        return connection

    def transmit(self, pipe: Pipe, frames: Frames) -> None:
        faults, dice, now = self.faults, pipe.dice, self.now()
        number = next(self._numbers)
        self.counts["sent"] += 1
        due = now + dice.between(*faults.latency_s)
        if dice.happens(faults.slow):
            due += dice.between(0.0, faults.slow_s)
            self.counts["slowed"] += 1
        fate = "sent"
        if dice.happens(faults.drop):
            fate = "dropped"
        elif dice.happens(faults.reset):
            fate = "reset"
        elif cut := self._find_cut(pipe.sender_id, pipe.receiver_id, now):
            fate = "held" if cut.hold else "cut"
            due = cut.until_s + dice.between(*faults.latency_s)
        arrives = pipe.receiver is not None and fate in ("sent", "held")
        # As over TCP: messages on a channel never overtake each other, and none arrives before the connection exists.
        due = max(due, pipe.last_due, pipe.connection.accepted_at)
        self._trace(fate, pipe.sender_name, pipe.receiver_name, pipe.channel.name, due if arrives else None, frames)
        if fate != "sent":
            self.counts[fate] += 1
        if fate == "reset":
            self._reset(pipe.connection, due)
        if not arrives:
            # A peer that is silently gone takes nothing more, so its outbox fills up; otherwise the place is freed.
            pipe.num_queued -= pipe.receiver is not None
            return
        pipe.last_due = due
        self._push(due, self._deliver, (pipe.receiver, pipe, frames, False), number)
        if dice.happens(faults.duplicate):
            self.counts["duplicated"] += 1
            self._push(due + dice.between(0.0, faults.duplicate_s), self._deliver, (pipe.receiver, pipe, frames, True))

    def close(self, link: Link, connection: Connection, *, flush: bool) -> None:
        """One side closes; the other is told: if `flush` after all sent messages, else after the longest latency."""
        at = self.now() + self.faults.latency_s[1]
        if flush:
            at = max([at, *(pipe.last_due for pipe in connection.pipes.values())])
        self._end_far_side(connection, link, "closed by peer", at)

    def _find_cut(self, sender: str, receiver: str, now: float) -> Cut | None:
        for cut in self._cuts:
            if now < cut.until_s and cut.parts(sender, receiver):
                return cut
        return self._random_cuts.find(self.faults, sender, receiver, now) if self.faults.partition else None

    def _reset(self, connection: Connection, at: float) -> None:
        for end, link in connection.sides():
            if end.links.get(link) is connection:
                self._push(at, self._down, (end, link, connection, "reset"))

    def _end_far_side(self, connection: Connection, near: Link, reason: str, at: float) -> None:
        for end, link in connection.sides():
            if link.dialed == near.dialed or end.state == "crashed":
                continue
            if connection.downs.happens(self.faults.silent_down):
                self.counts["silent_down"] += 1
                connection.forget_receiver(end)
                if self.faults.silent_s < float("inf"):
                    due = max(at, connection.accepted_at) + self.faults.silent_s
                    self._push(due, self._down, (end, link, connection, "no heartbeat"))
            else:
                self._push(max(at, connection.accepted_at), self._down, (end, link, connection, reason))

    def _accept(self, acceptor: End, connection: Connection) -> None:
        link = Link(connection.dialer.address, dialed=False)
        older = acceptor.links.get(link)
        if older is not None:
            self._down(acceptor, link, older, "replaced by a new connection")
        if acceptor.state == "listening":
            acceptor.links[link] = connection
        else:
            self._end_far_side(connection, link, "refused", self.now() + self.faults.latency_s[0])

    def _deliver(self, receiver: End, pipe: Pipe, frames: Frames, is_copy: bool) -> None:
        if not is_copy:
            pipe.num_queued -= 1
        if receiver.links.get(pipe.link) is not pipe.connection or receiver.listener is None:
            self.counts["lost"] += 1
            return
        self.counts["delivered"] += 1
        receiver.listener.on_frames(pipe.link, pipe.channel, frames)

    def _down(self, end: End, link: Link, connection: Connection, reason: str) -> None:
        if end.links.get(link) is not connection:
            return
        del end.links[link]
        self._note("link_down", str(end.address), str(link.peer), reason)
        if end.listener is not None:
            end.listener.on_link_down(link, reason)

    def _note(self, event: str, sender: str, receiver: str, detail: str) -> None:
        self.counts[event] += 1
        self._trace(event, sender, receiver, detail)

    def _trace(
        self, fate: str, sender: str, receiver: str, detail: str, due_s: float | None = None, frames: Frames = ()
    ) -> None:
        self.trace.add(TraceEntry(self.now(), fate, sender, receiver, detail, due_s, frames))

    def _push(
        self, due: float, handler: Callable[..., None], arguments: tuple[Any, ...], number: int | None = None
    ) -> None:
        """Call `handler(*arguments)` at `due`; the first argument is the end it happens to."""
        heapq.heappush(self._events, (due, next(self._numbers) if number is None else number, handler, arguments))
        self._arm()

    def _arm(self) -> None:
        if not self._events:
            return
        due = self._events[0][0]
        if self._armed_for is None or due < self._armed_for:
            # An older timer for a later time stays set and will find nothing to do: cheaper than cancelling it.
            assert self._loop is not None
            self._armed_for = due
            self._loop.call_at(due, self._pump, due, context=self._context)

    def _pump(self, due: float) -> None:
        # A loop may run timers early by up to its clock's resolution: then the timer's own time counts as now.
        now = max(self.now(), due)
        if self._armed_for is not None and self._armed_for <= now:
            self._armed_for = None
        try:
            while self._events and self._events[0][0] <= now:
                _, number, handler, arguments = heapq.heappop(self._events)
                end: End = arguments[0]
                if end.hung and end.state == "listening":
                    end.withheld.append((number, handler, arguments))
                    continue
                if handler == self._deliver and not arguments[3]:
                    self._count_overtaking(end, number)
                handler(*arguments)
        finally:
            self._arm()

    def _count_overtaking(self, receiver: End, number: int) -> None:
        if number < receiver.newest:
            self.counts["reordered"] += 1
        else:
            receiver.newest = number


class SimulatedTransport:
    """`mesh.transport.base.Transport` of one actor in a `SimulatedNetwork`."""

    def __init__(self, network: SimulatedNetwork, end: End, place: str) -> None:
        self._network = network
        self._end = end
        self._place = place

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        """Bind `sim://PLACE/c` and `/d`. Raises BindError if that is taken."""
        end = self._end
        if address != end.address or end.state != "new":
            raise BindError(f"the transport of {end.address} ({end.state}) cannot start as {address}: make a new one")
        endpoint = Endpoint(control=f"sim://{self._place}/c", data=f"sim://{self._place}/d")
        self._network.listen(end, endpoint)
        end.listener = listener
        end.state = "listening"
        return endpoint

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        link = Link(peer, dialed=True)
        if link not in self._end.links and self._end.state == "listening":
            self._end.links[link] = self._network.connect(self._end, link, endpoint)
        return link

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        connection = self._end.links.get(link)
        if connection is None:
            return False
        pipe = connection.pipes[link.dialed, channel]
        if pipe.num_queued >= self._network.outbox_limit:
            self._network.counts["refused"] += 1
            return False
        pipe.num_queued += 1
        frames = tuple(bytes(part) for part in parts)
        if self._end.hung:
            self._end.unsent.append((pipe, frames))
        else:
            self._network.transmit(pipe, frames)
        return True

    def close_link(self, link: Link) -> None:
        connection = self._end.links.pop(link, None)
        if connection is not None:
            self._network.close(link, connection, flush=False)

    async def stop(self) -> None:
        """Release the endpoint; sent messages still arrive, then the peers are told that the links are down."""
        if self._end.state != "listening":
            return
        self._network.close_end(self._end, "stopped")
        for link, connection in list(self._end.links.items()):
            self._network.close(link, connection, flush=True)
        self._end.links.clear()
