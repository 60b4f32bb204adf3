"""Bugs planted into storing and restoring (`mutations.py` says how), seen by `disks.py`.

Most promises here have two guards: a page that is read is compared by the agent's puller, by the store, and by its
checksum. Then all are taken away that would hide the bug.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.store import page_store
from kvstore.store.operations import FAILED, MEMORY_GONE
from kvstore.store.page_store import PageStore
from kvstore.store.pool_writes import PoolWrites
from kvstore.store.source import StorePeer
from kvstore.transfer.session import TransferSession
from nodes.kv_agent.pools import held
from nodes.kv_agent.stores.answers import StoreAnswers
from nodes.scheduler.books import Books
from nodes.scheduler.handoff.own_grants import OwnGrants
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.sequence import Stage
from tests.simulation.disks import OTHER_NUMERICS
from tests.simulation.planting import Bug, bug, meanwhile, returns

# storing


def _never_compared(_: Any, _self: PoolWrites, _name: str, pages: Any) -> list[bool]:
    return [True] * len(pages)


def _compared_once(are_current: Any, self: PoolWrites, name: str, pages: Any) -> list[bool]:
    is_first = not any(pages == batch.pages for batch in self._batches.values())
    return are_current(self, name, pages) if is_first else [True] * len(pages)


def _beside_old_head(_: Any, self: PageStore, piece: Any) -> None:
    self._end(piece, page_store._attempt(partial(self._files.write_pages, piece.slot, piece.pages)))


def _stored_though_it_failed(commit: Any, self: PageStore, write: Any, is_good: Any) -> None:
    write.failures = [None] * len(write.failures)
    commit(self, write, is_good)


# what a slot holds


def _unchecked(_: Any, self: PageStore, piece: Any, failure: Any) -> None:
    for number in piece.range:
        if piece.owner.outcomes[number] not in (FAILED, MEMORY_GONE):
            piece.owner.outcomes[number] = ""
    self._end(piece, failure)


def _whatever_is_there(read: Any, self: PageStore, slots: Any, _sequences: Any, pages: Any) -> Any:
    return read(self, slots, self.sequences(slots), pages)


def _never_stale(settle: Any, self: PageStore, piece: Any, read: Any) -> None:
    expected = [read.sequences[number] for number in piece.range]
    with patch.object(self, "sequences", lambda _: expected):
        settle(self, piece, read)


# whose pages are read


def _without_salt(uncached: Any, self: PrefixCache, token_ids: Any, _extra_key: str = "") -> Any:
    return uncached(self, token_ids)


def _of_other_numerics(on_find: Any, self: StoreAnswers, call: Any, message: Any, identity: Any) -> None:
    on_find(self, call, message, replace(identity, numerics=OTHER_NUMERICS))


def _from_the_beginning(on_found: Any, self: RestoreQueue, number: str, message: Any) -> None:
    self._looking = {name: (sequence, 0) for name, (sequence, _) in self._looking.items()}
    on_found(self, number, message)


# until when they are written


def _as_if_idle(take_back: Any, self: OwnGrants, loan: Any, *, idle: bool) -> None:
    take_back(self, loan, idle=idle or loan.sequence.stage is Stage.RESTORE)


def _all_good(take_back: Any, self: OwnGrants, loan: Any, **how: Any) -> None:
    num = len(loan.lent.pages) if loan.sequence.stage is Stage.RESTORE else loan.num_pulled
    with patch.object(loan, "num_pulled", num):
        take_back(self, loan, **how)


def _stays_away(put_back: Any, self: Books, sequence: Any) -> None:
    if sequence.stage is not Stage.RESTORE:
        put_back(self, sequence)


def _at_once(self: TransferSession) -> bool:
    return self.has_ended and (self.grant.stored is not None or not self.num_copying)


def _unless_restored(is_used: Any, sessions: Any, pool: Any) -> bool:
    return is_used([session for session in sessions if session.grant.stored is None], pool)


DISKS: dict[str, Bug] = {
    "generations are not compared before a write": bug(32, (PoolWrites, "_are_current", _never_compared)),
    "generations are not compared after a write": bug(32, (PoolWrites, "_are_current", _compared_once)),
    "a head stays while its slot is written": bug(10, (PageStore, "_write", _beside_old_head)),
    "what could not be written is stored": bug(10, (PageStore, "commit", _stored_though_it_failed)),
    "checksums are not compared": bug(12, (PageStore, "_check", _unchecked)),
    "a slot is read whatever it holds by now": bug(
        8, (PageStore, "read", _whatever_is_there), (StorePeer, "generations", returns(None))
    ),
    "sequences are not compared after a read": bug(
        33, (PageStore, "_settle_read", _never_stale), (StorePeer, "generations", returns(None))
    ),
    "pages of another salt are looked for": bug(3, (PrefixCache, "uncached", _without_salt)),
    "pages of other numerics are found": bug(0, (StoreAnswers, "on_find", _of_other_numerics)),
    "what is found begins at the first page": bug(7, (RestoreQueue, "on_found", _from_the_beginning)),
    "who begins alike does not wait": bug(0, (RestoreQueue, "must_wait", meanwhile(0, "_restores", lambda _: {}))),
    "pages of a failed restore are used at once": bug(49, (OwnGrants, "take_back", _as_if_idle)),
    "what did not come from the disk is cached": bug(6, (OwnGrants, "take_back", _all_good)),
    "a grant is closed while the disk is read": bug(7, (TransferSession, "is_quiesced", property(_at_once))),
    "a pool is freed while the disk is read": bug(17, (held, "is_used", _unless_restored)),
    "what was restored does not wait again": bug(0, (Books, "put_back", _stays_away)),
}  # fmt: skip
