"""Performs what `core.py` decides: empty tables, handles in headers, answers to workers.

Part of the kv_agent's actor, which still owns its pools.
"""

from collections.abc import Iterable
from typing import assert_never

import msgspec

from kvstore.errors import KVError
from kvstore.pool.header import PoolInfo
from kvstore.pool.page_pool import MemoryHost
from kvstore.protocol import MakePages, OfferPages, PagesOffered
from mesh.actor import Call
from mesh.address import Address
from mesh.runtime.driver import CoreDriver
from nodes.kv_agent.memory.actions import PoolOwner
from nodes.kv_agent.pools.own import absence
from nodes.kv_agent.worker_pools.core import (
    Command,
    Confirm,
    CopiesEnded,
    Event,
    MakeAsked,
    MakerLost,
    MakeTable,
    Offer,
    OfferAsked,
    Refuse,
    TableMade,
    TellTable,
    Withdraw,
    WorkerPools,
)


class WorkerPoolActions:
    """See the module. A pool's name is `prefix` and its group, since a worker that makes pools is the only rank."""

    def __init__(self, owner: PoolOwner, host: MemoryHost, infos: Iterable[PoolInfo], prefix: str) -> None:
        self._owner = owner
        self._host = host
        self._prefix = prefix
        self._core = WorkerPools((info.group, info.incarnation) for info in infos if info.is_in_worker)
        self._calls: dict[int, Call] = {}
        self._num_calls = 0
        self._withdrawn: set[str] = set()
        self._driver = CoreDriver[Event, Command](
            owner, "worker_pools", lambda event, _: self._core.handle(event), self._perform
        )

    def on_ask(self, call: Call, message: MakePages | OfferPages) -> None:
        """A worker wants to make pages, or has made them."""
        group = message.group
        if group not in self._core:
            call.fail("unknown_group", f"the pages of {group!r} are not made by a worker here")
            return
        info = self._owner.pools(group)[0].info
        if info.is_released:
            call.fail(*absence(info), retryable=True)
            return
        self._num_calls += 1
        number = self._num_calls
        self._calls[number] = call
        match message:
            case MakePages():
                self._handle(MakeAsked(number, group, call.sender))
            case OfferPages(incarnation=incarnation, ipc_handle=ipc_handle):
                self._handle(OfferAsked(number, group, call.sender, incarnation, ipc_handle))
            case _:
                assert_never(message)

    def is_pending(self, group: str) -> bool:
        """Whether a worker has yet to make the pages of this group."""
        return group in self._core and not self._core.is_offered(group)

    def on_lost(self, address: Address) -> None:
        """An incarnation of an actor is gone."""
        self._handle(MakerLost(address))

    def copies_changed(self) -> None:
        """Copies may have ended."""
        for group in [group for group in self._withdrawn if not self._owner.is_copying(group)]:
            self._withdrawn.discard(group)
            self._handle(CopiesEnded(group))

    def _handle(self, event: Event) -> None:
        self._driver.feed(event)

    def _perform(self, command: Command) -> None:
        match command:
            case Withdraw(group):
                self._owner.ctx.log.info("pages lost", group=group)
                self._withdrawn.add(group)
                self._owner.stop_copies(group)
                self.copies_changed()
            case MakeTable(group):
                self._make_table(group)
            case TellTable(number, group):
                call = self._calls.pop(number)
                call.reply(self._owner.handle(group))
                # From this answer on the worker may have the table mapped.
                self._owner.mapped(group, call.sender)
            case Offer(number, group, ipc_handle):
                self._offer(group, ipc_handle)
                self._confirm(number, group)
            case Confirm(number, group):
                self._confirm(number, group)
            case Refuse(number, code, message):
                self._calls.pop(number).fail(code, message, retryable=True)
            case _:
                assert_never(command)

    def _make_table(self, group: str) -> None:
        owner, old = self._owner, self._owner.pools(group)[0]
        incarnation = owner.next_incarnation()
        owner.forget_pool(group)
        old.close()
        try:
            # Without the handle: it names memory that died with the worker that made it.
            info = msgspec.structs.replace(old.info, incarnation=incarnation, ipc_handle=b"")
            made = self._host.create(self._prefix + group, info)
        except KVError as error:
            # The next agent starts from what is there; without a table, this one would refuse the group for good.
            owner.ctx.end(f"the page table of {group} cannot be made: {error.message}")
            return
        owner.put_pools(group, [made], is_offered=False)
        self._handle(TableMade(group, incarnation))

    def _offer(self, group: str, ipc_handle: bytes) -> None:
        owner, table = self._owner, self._owner.pools(group)[0]
        self._host.mark(table.path, msgspec.structs.replace(table.info, ipc_handle=ipc_handle))
        owner.forget_pool(group)
        table.close()
        # Reopened with the handle in its header: its pages can be copied from here on.
        owner.put_pools(group, [self._host.open(table.path, writable=True, own=True)], is_offered=True)
        owner.ctx.log.info("pages made by a worker", group=group, bytes=table.info.pages_bytes)

    def _confirm(self, number: int, group: str) -> None:
        incarnation = self._owner.pools(group)[0].info.incarnation
        self._calls.pop(number).reply(PagesOffered(group=group, incarnation=incarnation))
