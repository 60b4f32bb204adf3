"""Pools whose pages a worker has made in its own process: when they may be mapped, and when they are gone.

    empty --MakePages--> making --OfferPages--> offered --its maker is lost--> empty

The agent owns the page table, in host memory; the worker allocates the pages and exports them. An agent that never
copies from or to such pages then needs no CUDA context (it opens them with the first copy). In return, the death of a
worker costs its group's KV, which would otherwise outlive it: every worker that asks gets an empty table of another
incarnation, and schedulers that mapped the one before end. The death of the agent costs the KV too, as with all pools
on a device.

Pure; performed by `actions.py`.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple, assert_never

from mesh.address import Address

PAGES_PENDING: Final = "pages_pending"


# events


class MakeAsked(NamedTuple):
    """A worker wants to make the pages of a group; `call` numbers the call to answer."""

    call: int
    group: str
    worker: Address


class OfferAsked(NamedTuple):
    """A worker has made pages of this incarnation, and exports them as `ipc_handle`."""

    call: int
    group: str
    worker: Address
    incarnation: int
    ipc_handle: bytes


class MakerLost(NamedTuple):
    """An incarnation of an actor is gone, and everything it allocated with it."""

    address: Address


class CopiesEnded(NamedTuple):
    """No copy uses the pages of a withdrawn group any more."""

    group: str


class TableMade(NamedTuple):
    """`MakeTable` is done."""

    group: str
    incarnation: int


Event = MakeAsked | OfferAsked | MakerLost | CopiesEnded | TableMade


# commands


class Withdraw(NamedTuple):
    """Let nobody map the pool of a group or copy from or to it; `CopiesEnded` follows when no copy is left."""

    group: str


class MakeTable(NamedTuple):
    """Replace the page table by an empty one, of another incarnation; `TableMade` follows."""

    group: str


class TellTable(NamedTuple):
    """Answer a worker with its table's location."""

    call: int
    group: str


class Offer(NamedTuple):
    """Write the handle into the header, and let the pool be mapped and copied; then answer."""

    call: int
    group: str
    ipc_handle: bytes


class Confirm(NamedTuple):
    """Answer a worker whose pages are offered already."""

    call: int
    group: str


class Refuse(NamedTuple):
    """Answer a worker with a retryable error."""

    call: int
    code: str
    message: str


Command = Withdraw | MakeTable | TellTable | Offer | Confirm | Refuse


class _Group:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.maker: Address | None = None
        self.next: MakeAsked | None = None
        self.is_offered = False
        self.is_copying = False


class WorkerPools:
    """The groups of one agent whose pages are made by workers, with the incarnations of their (empty) tables."""

    def __init__(self, incarnations: Iterable[tuple[str, int]]) -> None:
        self._groups = {group: _Group(incarnation) for group, incarnation in incarnations}

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def is_offered(self, group: str) -> bool:
        """Whether a worker has made the pages and offered them."""
        return self._groups[group].is_offered

    def handle(self, event: Event) -> list[Command]:
        """Take one event; returns what to do, in order."""
        match event:
            case MakeAsked():
                return self._on_make(event, self._groups[event.group])
            case OfferAsked():
                return self._on_offer(event, self._groups[event.group])
            case MakerLost(address):
                return [command for name, group in self._groups.items() for command in self._lose(name, group, address)]
            case CopiesEnded(name):
                self._groups[name].is_copying = False
                return self._go_on(name, self._groups[name])
            case TableMade():
                return self._on_table(event, self._groups[event.group])
            case _:
                assert_never(event)

    def _on_make(self, event: MakeAsked, group: _Group) -> list[Command]:
        known = group.next.worker if group.next is not None else group.maker
        # A late ask of a dead incarnation must not take the pages from its successor.
        if known is not None and known.epoch > event.worker.epoch:
            return [Refuse(event.call, "superseded", f"{known} makes the pages of {event.group}")]
        # Its answer was lost; the table that was made for it is still empty.
        if group.maker == event.worker:
            return [TellTable(event.call, event.group)]
        commands: list[Command] = []
        if group.next is not None:
            commands.append(Refuse(group.next.call, "superseded", f"{event.worker} asked later"))
        group.next = event
        if group.maker is not None:
            # Its successor is there, so the old maker is gone, though no loss was reported.
            commands += self._withdraw(event.group, group)
        return commands + self._go_on(event.group, group)

    def _on_offer(self, event: OfferAsked, group: _Group) -> list[Command]:
        if group.maker != event.worker or group.incarnation != event.incarnation:
            message = f"pages of incarnation {event.incarnation} of {event.group} are not expected"
            return [Refuse(event.call, "superseded", message)]
        if group.is_offered:
            return [Confirm(event.call, event.group)]
        group.is_offered = True
        return [Offer(event.call, event.group, event.ipc_handle)]

    def _lose(self, name: str, group: _Group, address: Address) -> list[Command]:
        if group.next is not None and _is_up_to(group.next.worker, address):
            group.next = None
        if group.maker is None or not _is_up_to(group.maker, address):
            return []
        return self._withdraw(name, group) + self._go_on(name, group)

    def _withdraw(self, name: str, group: _Group) -> list[Command]:
        group.maker = None
        if not group.is_offered:
            return []
        group.is_offered = False
        # Until `CopiesEnded`: only the actor can tell that no copy is left.
        group.is_copying = True
        return [Withdraw(name)]

    def _go_on(self, name: str, group: _Group) -> list[Command]:
        # A copy may still write the old pages, and would take the new table for theirs.
        if group.next is None or group.maker is not None or group.is_copying:
            return []
        group.maker = group.next.worker
        return [MakeTable(name)]

    def _on_table(self, event: TableMade, group: _Group) -> list[Command]:
        group.incarnation = event.incarnation
        asked, group.next = group.next, None
        return [TellTable(asked.call, event.group)] if asked is not None else []


def _is_up_to(one: Address, gone: Address) -> bool:
    return one.actor_id == gone.actor_id and one.epoch <= gone.epoch
