"""What a kv_agent decides: whose pages may be written, by which copy, until when, and who is told how it ended.

A grant is a lease of pages by their scheduler: it ends when its transfer succeeds or fails, by `CloseGrant`, at its
deadline, or when its holder is lost or comes back in a later epoch. Each has one `TransferSession`. The agent alone
writes granted pages, so revoking a grant here is enough; `GrantClosed` is sent when no copy can still write.

Pure: `handle(event, now)` returns commands, which `actor.py` carries out. Imports no I/O.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any, Final, assert_never

from kvstore.protocol import (
    AnnouncePages,
    CloseGrant,
    GrantClosed,
    GrantRefused,
    GrantsOpened,
    MapPool,
    OpenGrant,
    OpenGrants,
    PagesReady,
    PoolHandle,
    TransferFailed,
)
from kvstore.transfer import session as transfer
from kvstore.transfer.failures import TRANSFER_FAILURES
from kvstore.transfer.session import TransferSession
from mesh.address import Address
from mesh.runtime.deadlines import Deadlines
from mesh.runtime.effects import Asked, Outbox, Reply, Told
from mesh.runtime.trace_ring import MAX_NUMBER, key_of
from nodes.kv_agent import events
from nodes.kv_agent.config import Bounds
from nodes.kv_agent.events import (
    CancelPull,
    Command,
    CopyDone,
    Draining,
    Event,
    GroupHeld,
    GroupReleased,
    MapForeign,
    Own,
    PeerGone,
    SourceId,
    SourceMapped,
    SourceRefused,
    SourceReleased,
    StartPull,
    StoreHeld,
    UnmapForeign,
)
from nodes.kv_agent.pools.facts import Pool
from nodes.kv_agent.pools.own import OwnPools, source_of
from nodes.kv_agent.sources import SourceFacts, Sources
from nodes.protocol.memory import MEMORY_RELEASED
from nodes.trace_notes import Noted, Noting, unheard

TRANSFER: Final = "transfer"
_SAME_IN_REPEATS: Final = ("group", "pages", "generations", "holder_epoch")


class AgentCore:
    """Grants and transfers of one kv_agent."""

    def __init__(self, actor_id: str, pools: Sequence[Pool], bounds: Bounds) -> None:
        self._actor_id = actor_id
        self._bounds = bounds
        self._own = OwnPools(actor_id, pools)
        self.sources = Sources(actor_id, self._own.sources)
        # Oldest first. A session stays after its end, to tell the senders of late announcements how it ended.
        self._sessions: dict[str, TransferSession] = {}
        self._writable: dict[tuple[str, int], str] = {}
        self._closing: dict[str, list[Any]] = {}
        # Asks for pools, and the grants whose copies must end before the answer.
        self._mapping: list[tuple[Asked, set[str]]] = []
        # For each holder, the earliest epoch that may have open grants: looking through all
        # tombstones for each grant took an eighth of the agent's time.
        self._oldest: dict[str, int] = {}
        self._deadlines = Deadlines()
        self._is_draining = False
        self.num_live = 0
        self.num_bytes = 0
        self.num_pages_pulled = 0
        self.num_transfers = 0
        self.failures: Counter[str] = Counter(dict.fromkeys(TRANSFER_FAILURES, 0))
        self.note: Noting = unheard
        self._outbox = Outbox[Own]()

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    @property
    def sessions(self) -> Collection[TransferSession]:
        """Transfers that run, and those that are remembered."""
        return self._sessions.values()

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case Asked():
                self._on_ask(event, now)
            case Told(sender, message):
                for ready in message.announced if isinstance(message, AnnouncePages) else ():
                    self._announced(sender, ready, now)
            case SourceMapped():
                facts = SourceFacts(event.incarnation, event.layout_digest)
                mapped = transfer.SourceMapped(event.incarnation, event.layout_digest)
                self._feed_all(self.sources.mapped(event.source, facts), mapped, now)
            case SourceRefused():
                refused = transfer.SourceRefused(event.code, event.message)
                self._feed_all(self.sources.refused(event.source), refused, now)
            case CopyDone():
                self._copied(event, now)
            case PeerGone():
                self._peer_gone(event.peer, event.reason, now)
            case Draining():
                self._is_draining = True
            case GroupReleased():
                self._withdraw(event, now)
            case GroupHeld(pool):
                self._own.put(pool)
            case StoreHeld(source, incarnation, layout_digest):
                self._own.sources[SourceId(self._actor_id, source)] = SourceFacts(incarnation, layout_digest)
            case SourceReleased(source):
                self._sources_gone(self.sources.gone(source), MEMORY_RELEASED, f"{source.agent} closed it", now)
            case events.Tick():
                while (key := self._deadlines.pop_due(now)) is not None:
                    self._feed(self._sessions[key[1]], transfer.Tick(), now)
            case _:
                assert_never(event)
        return self._outbox.take()

    # asks

    def _on_ask(self, asked: Asked, now: float) -> None:
        match asked.message:
            case MapPool():
                self._map_asked(asked, now)
            case OpenGrants():
                self._open(asked, asked.message.grants, now)
            case CloseGrant():
                self._close(asked, asked.message.grant_id, now)
            case _:
                raise AssertionError("the actor passes nothing else on")

    def _map_asked(self, asked: Asked, now: float) -> None:
        """A scheduler that maps its pool considers every page its own: nothing may still write there."""
        self._revoke_older(asked.sender, now)
        writing = {
            grant_id
            for grant_id, session in self._sessions.items()
            if session.grant.holder == asked.sender.actor_id and not session.is_quiesced
            and session.grant.holder_epoch < asked.sender.epoch
        }  # fmt: skip
        if writing:
            self._mapping.append((asked, writing))
        else:
            self._map(asked)

    def _map(self, asked: Asked) -> None:
        found = self._own.find(asked.call, asked.message.group, asked.message.rank)
        self._outbox.add(Reply(asked.call, found.handle(self._actor_id)) if isinstance(found, Pool) else found)

    def _open(self, asked: Asked, grants: Sequence[OpenGrant], now: float) -> None:
        self._revoke_older(asked.sender, now)
        opened: list[str] = []
        refused: list[GrantRefused] = []
        # One after the other: a page named by two of them is granted to the first.
        for grant in grants:
            refusal = self._open_one(asked.sender, grant, now)
            if refusal is None:
                opened.append(grant.grant_id)
                self._read_stored(grant, now)
            else:
                refused.append(GrantRefused(grant_id=grant.grant_id, code=refusal))
        self._outbox.reply(asked.call, GrantsOpened(opened=opened, refused=refused))

    def _open_one(self, sender: Address, grant: OpenGrant, now: float) -> str | None:
        """Open a grant, or again; the error code if it is refused."""
        if sender != (grant.holder, grant.holder_epoch):
            return "not_holder"
        session = self._sessions.get(grant.grant_id)
        if session is not None:
            return self._open_again(session, grant, now)
        if (refusal := self._refusal(grant)) is not None:
            return refusal
        session = TransferSession(grant, now, self._bounds.session)
        self._sessions[grant.grant_id] = session
        self._oldest[grant.holder] = min(self._oldest.get(grant.holder, grant.holder_epoch), grant.holder_epoch)
        self._writable.update(dict.fromkeys(zip(repeat(grant.group), grant.pages, strict=False), grant.grant_id))
        self.num_live += 1
        self.num_transfers += 1
        self.note(Noted.LENT, grant.request_id, len(grant.pages), 0)
        self._arm(session)
        return None

    def _read_stored(self, grant: OpenGrant, now: float) -> None:
        """This agent itself announces what it has stored. An ask that is repeated announces the same again."""
        stored, session = grant.stored, self._sessions[grant.grant_id]
        if stored is None or session.sender:
            return
        ready = PagesReady(
            grant_id=grant.grant_id,
            first=0,
            total=len(stored.slots),
            source_group=stored.source,
            source_agent=self._actor_id,
            source_incarnation=stored.incarnation,
            layout_digest=grant.layout_digest,
            pages=stored.slots,
            generations=stored.sequences,
        )
        self._feed(session, transfer.Announced(self._actor_id, 0, ready), now)

    def _open_again(self, session: TransferSession, grant: OpenGrant, now: float) -> str | None:
        old = session.grant
        if any(getattr(old, name) != getattr(grant, name) for name in _SAME_IN_REPEATS):
            return "grant_id_taken"
        if session.has_ended or session.is_closed:
            return "grant_used"
        session.renew(grant.timeout_s, now)
        self._arm(session)
        return None

    def _refusal(self, grant: OpenGrant) -> str | None:
        if self._is_draining:
            return "draining"
        if self.num_live >= self._bounds.max_grants:
            return "too_many_grants"
        if (refusal := self._own.misfit(grant)) is not None:
            return refusal
        is_free = self._writable.keys().isdisjoint(zip(repeat(grant.group), grant.pages, strict=False))
        return None if is_free else "page_granted"

    def _close(self, asked: Asked, grant_id: str, now: float) -> None:
        session = self._sessions.get(grant_id)
        if session is None:
            # Unknown is as good as closed: nothing can write pages of a grant that is not here, and an earlier answer
            # may have been lost.
            self._outbox.reply(asked.call, GrantClosed(grant_id=grant_id))
        elif asked.sender.actor_id != session.grant.holder:
            self._outbox.refuse(asked.call, "not_holder", f"{asked.sender} does not hold grant {grant_id}")
        else:
            # Answered when the last copy has ended; asks repeat, so there may be several.
            self._closing.setdefault(grant_id, []).append(asked.call)
            self._feed(session, transfer.Revoked("grant_closed", "the decode side closed the grant"), now)

    # what comes from outside

    def _announced(self, sender: Address, ready: PagesReady, now: float) -> None:
        """A prefill scheduler says that pages are finished."""
        session = self._sessions.get(ready.grant_id)
        if session is None:
            message = "no such grant: it ended or the agent restarted; request the transfer again with a new grant"
            failed = TransferFailed(grant_id=ready.grant_id, code="unknown_grant", message=message)
            self._outbox.tell(sender.actor_id, failed)
        else:
            self._feed(session, transfer.Announced(sender.actor_id, sender.epoch, ready), now)

    def _copied(self, event: CopyDone, now: float) -> None:
        self.num_bytes += event.num_bytes
        session = self._sessions.get(event.grant_id)
        if session is None:
            return
        self.note(Noted.COPIED, session.grant.request_id, min(event.num_bytes, MAX_NUMBER), key_of(event.transport))
        before = session.num_pages
        self._feed(session, event.ended, now)
        self.num_pages_pulled += session.num_pages - before

    def _peer_gone(self, peer: Address, reason: str, now: float) -> None:
        if self._oldest.get(peer.actor_id, 0) <= peer.epoch:
            self._oldest.pop(peer.actor_id, None)
        gone = self.sources.agent_gone(peer.actor_id)
        for session in list(self._sessions.values()):
            grant = session.grant
            if grant.holder == peer.actor_id and grant.holder_epoch <= peer.epoch:
                self._feed(session, transfer.Revoked("holder_lost", f"{peer} is gone: {reason}"), now)
            elif session.sender == peer.actor_id and session.sender_epoch <= peer.epoch:
                self._feed(session, transfer.SenderLost(f"{peer} is gone: {reason}"), now)
        self._sources_gone(gone, "source_lost", f"{peer} is gone: {reason}", now)

    def _sources_gone(self, gone: Collection[SourceId], code: str, message: str, now: float) -> None:
        """Foreign pools cannot be read any more: their mappings are given up, and copies from them end."""
        for source in gone:
            self._outbox.add(UnmapForeign(source))
        for session in list(self._sessions.values()):
            if source_of(session) in gone:
                self._feed(session, transfer.SourceRefused(code, message), now)

    def _withdraw(self, event: GroupReleased, now: float) -> None:
        """Nothing may be written to an own pool, or read from it; `is_used` says whether a copy still does."""
        group, code, message = event
        source = self._own.withdraw(group, code, message)
        for session in list(self._sessions.values()):
            if session.grant.group == group:
                self._feed(session, transfer.Revoked(code, message), now)
            elif source_of(session) == source:
                self._feed(session, transfer.SourceRefused(code, message), now)

    def handle_of(self, group: str) -> PoolHandle:
        pool = self._own.get(group)
        assert pool is not None, "asked for a group of this agent"
        return pool.handle(self._actor_id)

    def _revoke_older(self, holder: Address, now: float) -> None:
        """Revoke grants from a holder's earlier epochs, of which it does not know."""
        if self._oldest.get(holder.actor_id, holder.epoch) >= holder.epoch:
            return
        self._oldest[holder.actor_id] = holder.epoch
        for session in list(self._sessions.values()):
            grant = session.grant
            if grant.holder == holder.actor_id and grant.holder_epoch < holder.epoch and not session.is_closed:
                self._feed(session, transfer.Revoked("holder_lost", f"{holder} took over"), now)

    # sessions

    def _feed_all(self, grant_ids: Sequence[str], event: transfer.Event, now: float) -> None:
        for grant_id in grant_ids:
            if (session := self._sessions.get(grant_id)) is not None:
                self._feed(session, event, now)

    def _feed(self, session: TransferSession, event: transfer.Event, now: float) -> None:
        was_quiesced, had_ended = session.is_quiesced, session.has_ended
        pending: list[transfer.Event] = [event]
        while pending:
            for command in session.handle(pending.pop(0), now):
                if isinstance(command, transfer.MapSource):
                    self._map_source(session, command, pending)
                else:
                    self._perform(session, command)
        if session.has_ended and not had_ended:
            self._note_end(session)
        if session.is_quiesced:
            if not was_quiesced:
                self._quiesced(session)
            grant_id = session.grant.grant_id
            for call in self._closing.pop(grant_id, ()):
                self._outbox.reply(call, GrantClosed(grant_id=grant_id))
            self._mapped(grant_id)
        if session.is_over(now):
            self._forget(session.grant.grant_id)
        elif session.grant.grant_id in self._sessions:
            self._arm(session)

    def _note_end(self, session: TransferSession) -> None:
        failure = session.failure.code
        if session.phase is transfer.Phase.FAILED:
            self.failures[failure] += 1
            self.note(Noted.FAILED, session.grant.request_id, session.num_pages, key_of(failure))
        else:
            self.note(Noted.COMPLETE, session.grant.request_id, session.num_pages, 0)

    def _mapped(self, grant_id: str) -> None:
        """A copy has ended: answer asks for pools that waited for it."""
        for _, writing in self._mapping:
            writing.discard(grant_id)
        answered = [asked for asked, writing in self._mapping if not writing]
        self._mapping = [(asked, writing) for asked, writing in self._mapping if writing]
        for asked in answered:
            self._map(asked)

    def _map_source(self, session: TransferSession, wanted: transfer.MapSource, pending: list[transfer.Event]) -> None:
        source = SourceId(wanted.agent, wanted.group)
        facts = self.sources.want(source, wanted.incarnation, session.grant.grant_id)
        if facts is not None:
            pending.append(transfer.SourceMapped(*facts))
        elif source.agent == self._actor_id:
            pending.append(self._own.refusal(source.group))
        elif self.sources.must_ask(source):
            self._outbox.add(MapForeign(source))

    def _perform(
        self, session: TransferSession, command: transfer.Send | transfer.StartCopy | transfer.CancelCopy
    ) -> None:
        grant = session.grant
        match command:
            case transfer.Send(receiver, message):
                # Of what is read from its own store this agent is the sender, and need not tell itself.
                if receiver != self._actor_id:
                    self._outbox.tell(receiver, message)
            case transfer.CancelCopy(copy_id):
                self._outbox.add(CancelPull(grant.grant_id, copy_id))
            case transfer.StartCopy():
                assert session.source is not None, "a session copies only from a source it has mapped"
                agent, group, incarnation = session.source
                self.note(Noted.COPYING, grant.request_id, len(command.pages), len(grant.pages))
                source = SourceId(agent, group)
                self._outbox.add(StartPull(grant.grant_id, grant.group, source, incarnation, command))
            case _:
                assert_never(command)

    def _quiesced(self, session: TransferSession) -> None:
        """Nothing writes these pages any more: they may be granted again."""
        grant = session.grant
        self.num_live -= 1
        for page in grant.pages:
            self._writable.pop((grant.group, page), None)
        if len(self._sessions) - self.num_live > self._bounds.max_remembered:
            # Only a tombstone may be forgotten: a session that may still write holds its pages.
            oldest = next(session for session in self._sessions.values() if session.is_quiesced)
            self._forget(oldest.grant.grant_id)

    def _arm(self, session: TransferSession) -> None:
        key = (TRANSFER, session.grant.grant_id)
        if self._deadlines.at(key) != session.deadline:
            self._deadlines.set(key, session.deadline)

    def _forget(self, grant_id: str) -> None:
        self._sessions.pop(grant_id, None)
        self._deadlines.clear((TRANSFER, grant_id))
