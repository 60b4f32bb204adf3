"""The state of a simulated network's ends and connections; `mesh/simulation/network.py` drives it."""

from collections.abc import Callable
from typing import Any

from mesh.address import Address
from mesh.simulation.faults import Dice
from mesh.transport.base import Channel, Link, Listener

Frames = tuple[bytes, ...]
Happening = tuple[int, Callable[..., None], tuple[Any, ...]]


class End:
    """One actor's end of all its connections. `state`: new, listening, stopped or crashed."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.listener: Listener | None = None
        self.state = "new"
        self.hung = False
        self.links: dict[Link, Connection] = {}
        # While the actor hangs: events withheld from it, and messages it would have sent.
        self.withheld: list[Happening] = []
        self.unsent: list[tuple[Pipe, Frames]] = []
        self.newest = 0

    def close(self, state: str) -> None:
        self.state = state
        self.listener = None
        self.withheld.clear()
        self.unsent.clear()


class Pipe:
    """One direction of a channel; `link` is its name at the receiver, `num_queued` those in flight or waiting."""

    def __init__(
        self,
        connection: "Connection",
        sender: Address,
        receiver: End | None,
        peer: Address,
        channel: Channel,
        link: Link,
    ) -> None:
        self.connection = connection
        self.receiver = receiver
        self.channel = channel
        self.link = link
        self.sender_name, self.receiver_name = str(sender), str(peer)
        self.sender_id, self.receiver_id = sender.actor_id, peer.actor_id
        self.dice = Dice(f"{connection.name}/{sender}/{channel.name}")
        self.last_due = 0.0
        self.num_queued = 0


class Connection:
    """The result of a dial: two ends, four pipes."""

    def __init__(self, dialer: End, acceptor: End | None, peer: Address, name: str) -> None:
        self.dialer = dialer
        self.acceptor = acceptor
        self.name = name
        self.accepted_at = 0.0
        self.downs = Dice(f"{name}/down")
        self.pipes: dict[tuple[bool, Channel], Pipe] = {}
        here, there = Link(peer, dialed=True), Link(dialer.address, dialed=False)
        for channel in Channel:
            self.pipes[True, channel] = Pipe(self, dialer.address, acceptor, peer, channel, there)
            self.pipes[False, channel] = Pipe(self, peer, dialer, dialer.address, channel, here)

    def sides(self) -> list[tuple[End, Link]]:
        ends = [(self.dialer, self.pipes[False, Channel.CONTROL].link)]
        if self.acceptor is not None:
            ends.append((self.acceptor, self.pipes[True, Channel.CONTROL].link))
        return ends

    def forget_receiver(self, unaware: End) -> None:
        """The end facing `unaware` is gone without its knowledge: what `unaware` sends from now on piles up."""
        for channel in Channel:
            self.pipes[unaware is self.dialer, channel].receiver = None
