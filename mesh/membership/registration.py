"""An actor's membership: joins at the registry, keeps the view up to date, joins again when the registry returns.

    join ──ok──> joined ──registry lost, change missed, lease gone, something to announce──> join
      ├─another epoch of the registry answers─> join
      └─failed─> wait (backoff with jitter), look up where the registry is now, join

While the registry is away the view stays as it is. Owned by `ActorSystem`; the view is `mesh/membership/view.py`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Final

from mesh.address import Address, host_of
from mesh.calls.asking import Asking
from mesh.errors import (
    STALE_EPOCH,
    WRONG_MESH,
    WRONG_SPEC,
    CallError,
    MeshError,
    PeerLost,
    RemoteError,
    Superseded,
    Unreachable,
    WrongMesh,
    WrongSpec,
)
from mesh.membership.changes import BYE_GRACE_S
from mesh.membership.incarnation import Incarnation
from mesh.membership.view import SUPERVISOR, Member, MemberChange, is_of_host
from mesh.options import SystemOptions
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.wire.frames import STOPPED, Heartbeat, Join, Joined, Leave, MembersChanged, PeerDown

_ENDS: Final = {WRONG_MESH: WrongMesh, WRONG_SPEC: WrongSpec}
_MAX_EARLY: Final = 64
"""Changes kept while joining. More are dropped: the gap shows in the versions, and a snapshot fills it."""


class Registration:
    """The membership of one actor.

    `me` describes the member to join as, finds the registry, and is told if that will never admit it; its view is kept
    up to date. `changed` is called with each non-empty change of the view, and the members that left in an orderly way.
    """

    def __init__(
        self,
        asking: Asking,
        me: Incarnation,
        changed: Callable[[MemberChange, Collection[Address]], None],
        options: SystemOptions,
        tasks: TaskSupervisor,
    ) -> None:
        self.view = me.view
        self.registry: Address | None = None
        self.trouble = ""
        """Why the last join failed; empty if it succeeded or none has failed yet."""
        self._asking = asking
        self._me = me
        self._changed = changed
        self._options = options
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._wanted = asyncio.Event()
        self._first = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._joining: Address | None = None
        self._early: list[MembersChanged] = []
        self._hurried = asyncio.Event()
        self._has_lapsed = False
        # Supervisors that left in good order a moment ago: the registry's notice may overtake their last words.
        self._parting: set[Address] = set()

    def start(self) -> None:
        self._wanted.set()
        self._task = self._tasks.spawn(self._keep_joined(), "registration")

    def announce(self) -> None:
        """This actor describes itself differently, or the registry has lost something: join again."""
        self._wanted.set()

    def found(self, address: Address) -> None:
        """A later incarnation answers where a peer was dialed: if it is the registry's, it is joined at once."""
        if self._me.bootstrap.learn(address):
            self._hurried.set()

    @property
    def supervisor(self) -> Address | None:
        """The incarnation that started this actor, if any did."""
        supervisor = self._options.supervisor
        return supervisor[0] if supervisor is not None else None

    async def joined(self) -> None:
        # Several callers may wait, and one that gives up must not cancel it for the others.
        await asyncio.shield(self._first)

    async def leave(self, timeout_s: float) -> None:
        """End the membership. A failure is ignored: the lease expires by itself."""
        # First, since joining again while the leave is on its way would undo it.
        if self._task is not None:
            self._task.cancel()
        if self.registry is None:
            return
        me = self._me.describe()
        leave = Leave(actor_id=me.actor_id, epoch=me.epoch, reason=STOPPED)
        with contextlib.suppress(CallError):
            await self._asking.ask(self.registry.actor_id, leave, timeout_s=timeout_s)

    def peer_lost(self, address: Address) -> None:
        if address == self._joining:
            self._joining = None
        if address == self.registry:
            self.registry = None
            self._has_lapsed = True
            self._wanted.set()

    def heartbeat(self, peer: Address, beat: Heartbeat) -> None:
        """What a hub says of the registry: join again if this actor has missed a change, or holds no lease any more."""
        told, seen = (beat.registry_epoch, beat.version), (self.view.registry_epoch, self.view.version)
        if peer == self.registry:
            is_lapsed, is_behind = not beat.known, told != seen
        elif peer == self.supervisor:
            # It may know an earlier registry, or less of this one, than this actor does.
            is_lapsed, is_behind = not beat.known and beat.registry_epoch >= seen[0], told > seen
        else:
            # The next registry may know it from others alone, and is about to give it up: a join was lost, perhaps.
            if beat.renew and self.registry is None and (target := self._me.bootstrap.lookup()) and target[0] == peer:
                self._hurried.set()
            return
        if is_lapsed or is_behind:
            self._has_lapsed = self._has_lapsed or is_lapsed
            self._wanted.set()

    def members_changed(self, sender: Address, body: MembersChanged) -> bool:
        """The registry announces a change; False if `sender` is not the registry."""
        if sender == self.registry:
            self._apply(body)
            return True
        # Not even kept if it comes from neither the registry nor the one that this actor is joining.
        if sender != self._joining:
            return False
        # It follows the answer to the join, which may have arrived but not been processed yet.
        if len(self._early) < _MAX_EARLY:
            self._early.append(body)
        return True

    def may_say_dead(self, sender: Address, down: PeerDown) -> bool:
        """Whether the sender is entitled to report this death: a false report would cut off a living actor."""
        host, view = host_of(sender.actor_id), self.view
        if sender == self.registry:
            return True
        if sender == self.supervisor:
            if not host:
                return True
        else:
            # A supervisor of another host; or of this one, if this actor was started by hand and has none of its own.
            member = view.get(sender.actor_id)
            is_there = member is not None and member.address == sender and member.role == SUPERVISOR
            if not is_there and sender not in self._parting:
                return False
            # A supervisor passes on reports of others on its own host only, so one that lies harms no other host.
            if down.said_by and host != self._me.describe().host:
                return False
        return is_of_host(down.actor_id, view.get(down.actor_id), host_of(down.said_by or sender.actor_id))

    def _apply(self, body: MembersChanged) -> None:
        change = self.view.apply(
            body.registry_epoch, body.version, body.upserted, [departed.address for departed in body.left], body.follows
        )
        if change is None:
            self._wanted.set()
        elif change:
            leaving = {departed.address for departed in body.left if departed.reason == STOPPED}
            parting = {one.address for one in change.left if one.role == SUPERVISOR} & leaving
            if parting:
                self._parting |= parting
                self._tasks.later(BYE_GRACE_S, self._parting.difference_update, parting)
            self._changed(change, leaving)

    async def _keep_joined(self) -> None:
        pause_s = self._options.retry_min_s
        while True:
            await self._wanted.wait()
            # Before joining, so that an `announce` during the join leads to another one.
            self._wanted.clear()
            # A registry found earlier is the one that this join asks; only one found meanwhile calls for a quick retry.
            self._hurried.clear()
            if await self._join():
                pause_s = self._options.retry_min_s
                continue
            self._wanted.set()
            if self._hurried.is_set():
                continue
            # Jitter keeps the members of a mesh from all joining a returning registry at the same moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._options.random.uniform(0.5, 1.0)):
                    await self._hurried.wait()
            pause_s = min(pause_s * 2, self._options.retry_max_s)

    async def _join(self) -> bool:
        target = self._me.bootstrap.lookup()
        if target is None:
            return False
        address = target[0]
        view = self.view
        me = self._me.describe()
        join = Join(
            member=me,
            known_epoch=view.registry_epoch,
            known_version=view.version,
            known_members=self._known_members(address, host_of(me.actor_id)),
            mesh=self._options.mesh,
            spec=self._options.spec,
        )
        self._joining = address
        try:
            answer = await self._asking.ask(address.actor_id, join, timeout_s=self._options.join_timeout_s)
        except CallError as error:
            if not (self.trouble and isinstance(error, Unreachable)):
                # An `Unreachable` says no more than that an earlier attempt failed and when the next one is due.
                self.trouble = (isinstance(error, PeerLost) and error.reason) or error.message
            end = _end_of(error)
            if end is not None:
                self._me.is_over(address, end)
            return False
        finally:
            # It may have been lost after its answer arrived but before it was processed; this is not reported again.
            is_lost = self._joining != address
            self._joining, early, self._early = None, self._early, []
        joined = answer.message
        if not isinstance(joined, Joined):
            return False
        self.registry = answer.sender
        self.trouble = ""
        self._has_lapsed = False
        # A change may have overtaken the answer; going back behind it would bring dead members back to life.
        is_old = joined.registry_epoch == view.registry_epoch and joined.version < view.version
        if joined.members is not None and not is_old:
            change = view.reset(joined.registry_epoch, joined.version, joined.members)
            if change:
                self._changed(change, ())
        # After the snapshot, as they may follow it; changes that it already includes are empty.
        for body in early:
            self._apply(body)
        if not self._first.done():
            self._first.set_result(None)
        if is_lost:
            self.peer_lost(answer.sender)
        return True

    def _known_members(self, registry: Address, host: str) -> list[Member]:
        if self.view.registry_epoch != registry.epoch:
            # It has just started: from the members' views it recovers the whole mesh before all have joined.
            return self.view.all()
        if not self._has_lapsed or not host:
            return []
        # A whole host was cut off, and the registry took all its actors for gone; its snapshot would say so, and end
        # links that never failed.
        return [member for member in self.view.all() if host_of(member.actor_id) == host]


def _end_of(error: CallError) -> MeshError | None:
    if not isinstance(error, RemoteError):
        return None
    if error.code == STALE_EPOCH:
        return Superseded(error.message, error.known_epoch)
    end = _ENDS.get(error.code)
    return end and end(error.message)
