"""What a kv_agent decides when an operator releases a group's memory, and when the group gets it back.

    held --ReleaseMemory--> releasing --> released --ResumeMemory--> resuming --> held

    releasing   the desired state is in the pool's header; nobody is given the pool any more; copies end; every actor
                that may have mapped it lets go, first the scheduler and agents, then the workers; only then is it freed
    resuming    if the pool was freed, it is made again as another incarnation, without that state in its header;
                workers that let go take up; the scheduler comes by itself, since it waits for the pool

The desired state outlives every process, because it is in the pool's file. Everything else is derived from the members:
a worker of a released group that says it is ready is asked to let go, one of a held group that says it is released is
asked to take up, whatever made it so. So nothing else has to survive a death, and an ask that was lost, or answered by
a process that has died since, is made again.

An actor that was given the pool is a holder until it says that it let go, or is gone. A holder that does neither keeps
the group `releasing`, and is named: steps have deadlines, and hung actors are killed by their supervisor.

Pure: `handle(event, now)` returns commands, which `actions.py` performs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, assert_never

from kvstore.pool.device import CPU
from kvstore.protocol import PoolHandle
from mesh.address import Address
from mesh.membership.view import RELEASED
from mesh.runtime.effects import Answered, Asked, AskFailed, Outbox
from nodes.kv_agent.memory.events import (
    CopiesEnded,
    DesiredState,
    FreePool,
    HolderLost,
    HolderSeen,
    MakePool,
    Mapped,
    Mark,
    MembersSeen,
    MemoryCommand,
    MemoryEvent,
    Offer,
    Order,
    Own,
    PoolFacts,
    PoolFreed,
    PoolMade,
    PoolRefused,
    StopCopies,
    Tick,
)
from nodes.protocol.memory import (
    BACKUP,
    KEEP,
    RELOAD,
    GroupMemory,
    HasLetGo,
    HasTakenUp,
    LetGo,
    ListMemory,
    MemoryList,
    ReleaseMemory,
    ResumeMemory,
    TakeUp,
)
from nodes.roles import WORKER

HELD: Final = "held"
RELEASING: Final = "releasing"
RESUMING: Final = "resuming"
ASK_TIMEOUT_S: Final = 5.0
"""A worker that loads weights takes longer: it is asked again, and answers when it is done."""


class _Group:
    """One group. `answered`: holders that did what order `number` asked; `asked`: those that have not answered yet.

    `let_go`: holders that were asked to let go, and have not reported since that they took up.
    """

    def __init__(self, facts: PoolFacts) -> None:
        self.name = facts.group
        self.device = facts.device
        self.num_bytes = facts.num_bytes
        self.desired = facts.desired
        self.is_there = facts.is_there
        self.tp_size = facts.tp_size
        self.is_changing = False
        self.is_copying = False
        self.mappers: set[Address] = set()
        self.answered: set[Address] = set()
        self.let_go: set[Address] = set()
        self.asked: set[Address] = set()
        self.number = 0
        self.retry_at: float | None = None
        self.reason = ""


class MemoryCore:
    """The groups of one kv_agent. `handle_of` says where a group's pool is, for holders that take it up.

    `retry_s` is the pause before a holder is asked again.
    """

    def __init__(
        self, pools: Iterable[PoolFacts], handle_of: Callable[[str], PoolHandle], retry_s: float = 0.5
    ) -> None:
        self._groups = {facts.group: _Group(facts) for facts in pools}
        self._handle_of = handle_of
        self._retry_s = retry_s
        self._seen: dict[Address, HolderSeen] = {}
        # Before an agent that has just started knows the members, it does not know of one that has the pool mapped.
        self._knows_members = False
        self._members: frozenset[Address] = frozenset()
        self._number = 0
        self._outbox = Outbox[Own]()

    @property
    def next_deadline(self) -> float | None:
        return min((group.retry_at for group in self._groups.values() if group.retry_at is not None), default=None)

    def describe(self, names: Iterable[str] = ()) -> list[GroupMemory]:
        """The state of the named groups, or of all if none is named."""
        wanted = sorted(names) or sorted(self._groups)
        return [self._describe(self._groups[name]) for name in wanted]

    def handle(self, event: MemoryEvent, now: float) -> list[MemoryCommand]:
        refusal: tuple[str, str] | None = None
        match event:
            case Asked(_, message):
                refusal = self._on_wanted(message)
            case Mapped(group, holder):
                self._groups[group].mappers.add(holder)
            case MembersSeen():
                self._on_members(event)
            case HolderLost(address):
                self._forget(address)
            case CopiesEnded(group):
                self._groups[group].is_copying = False
            case Answered():
                self._on_answered(event, now)
            case AskFailed(order, code, message):
                self._on_not_done(order, f"{code}: {message}", now)
            case PoolFreed(group):
                self._groups[group].is_changing = self._groups[group].is_there = False
            case PoolMade(group):
                self._on_made(self._groups[group])
            case PoolRefused(group, reason):
                self._on_refused(self._groups[group], reason)
            case Tick():
                for group in self._groups.values():
                    if group.retry_at is not None and group.retry_at <= now:
                        group.retry_at = None
            case _:
                assert_never(event)
        for group in self._groups.values():
            self._go_on(group)
        if isinstance(event, Asked) and refusal is not None:
            self._outbox.refuse(event.call, *refusal)
        elif isinstance(event, Asked):
            self._outbox.reply(event.call, MemoryList(groups=self.describe(_names(event.message))))
        return self._outbox.take()

    # what operators want

    def _on_wanted(self, message: ReleaseMemory | ResumeMemory | ListMemory) -> tuple[str, str] | None:
        """Begin what an operator wants; the code and the reason if it cannot be."""
        names = _names(message) or sorted(self._groups)
        unknown = [name for name in names if name not in self._groups]
        if unknown:
            known = ", ".join(sorted(self._groups)) or "none"
            return "unknown_group", f"this agent has no pool of {', '.join(unknown)} (it has: {known})"
        groups = [self._groups[name] for name in names]
        if isinstance(message, ReleaseMemory):
            return self._release(groups, message)
        if isinstance(message, ResumeMemory):
            for group in groups:
                self._resume(group)
        return None

    def _release(self, groups: list[_Group], message: ReleaseMemory) -> tuple[str, str] | None:
        """As `_on_wanted`."""
        if message.keep_weights and message.keep_kv:
            return "nothing_to_release", "weights and KV are both to be kept: there is nothing to release"
        wanted: list[tuple[_Group, DesiredState]] = []
        for group in groups:
            # A worker releases in place only if it is the group's only rank.
            if message.keep_weights and group.tp_size > 1:
                text = (
                    f"the weights of {group.name} cannot be kept: it has {group.tp_size} tensor-parallel ranks, so its"
                    " processes end to release the pool, and read their weights from disk again; ask without"
                    " keep_weights (--keep-weights) and, if it is on a device, with reload_weights (--reload-weights)"
                )
                return "keep_weights", text
            weights = KEEP if message.keep_weights else self._way_of_weights(group, message.reload_weights)
            if group.desired is not None:
                weights = group.desired.weights if message.keep_weights == (group.desired.weights == KEEP) else weights
            desired = DesiredState(not message.keep_kv, weights)
            if not weights:
                text = (
                    f"the workers of {group.name} run without a memory saver, so their weights can only be dropped and"
                    " read from disk again: ask for that (--reload-weights), keep them (--keep-weights), or start the"
                    " mesh with --memory-saver"
                )
                return "memory_saver_off", text
            # Two ways cannot be mixed: some workers would keep their weights while others have already dropped them.
            if group.desired is not None and group.desired != desired:
                text = f"{group.name} is already released in another way ({_words(group.desired)}): resume it first"
                return "already_released", text
            wanted.append((group, desired))
        for group, desired in wanted:
            if group.desired is None and not group.is_changing:
                self._begin(group, desired)
        return None

    def _way_of_weights(self, group: _Group, is_reload: bool) -> str:
        workers = self._workers(group)
        # In host memory a backup would be where the weights already are; without a worker there is nothing to back up.
        if is_reload or group.device == CPU or not workers:
            return RELOAD
        return BACKUP if all(worker.saver for worker in workers) else ""

    def _begin(self, group: _Group, desired: DesiredState) -> None:
        group.desired = desired
        group.reason = ""
        self._renumber(group)
        # First of all: after a crash from here on, the next agent finds it in the header and continues.
        self._outbox.add(Mark(group.name, desired))
        group.is_copying = True
        self._outbox.add(StopCopies(group.name))

    def _resume(self, group: _Group) -> None:
        if group.desired is None or group.is_changing:
            return
        if not group.is_there:
            # `reason`, why the last try failed, stays until one succeeds.
            group.is_changing = True
            self._outbox.add(MakePool(group.name))
            return
        # Workers that have let go already are asked to take up; the others need not be.
        self._outbox.add(Mark(group.name, None))
        self._outbox.add(Offer(group.name))
        self._held(group)

    def _on_made(self, group: _Group) -> None:
        group.is_changing = False
        group.is_there = True
        group.reason = ""
        self._held(group)

    def _on_refused(self, group: _Group, reason: str) -> None:
        """The group stays released: the memory's current user has to give it back first."""
        group.is_changing = False
        group.reason = reason

    def _held(self, group: _Group) -> None:
        group.desired = None
        group.is_copying = False
        self._renumber(group)

    def _renumber(self, group: _Group) -> None:
        self._number += 1
        group.number = self._number
        group.answered.clear()
        group.asked.clear()
        group.retry_at = None

    # who holds what

    def _on_members(self, event: MembersSeen) -> None:
        self._members, self._knows_members = event.members, True
        seen = {member.address: member for member in event.holders}
        for address, member in seen.items():
            known = self._seen.get(address)
            group = self._groups.get(member.group)
            if group is not None and (known is None or known.state != member.state):
                # It has changed since it answered, or this view is older than its answer: then it answers once more.
                group.answered.discard(address)
        self._seen = seen
        newest = {address.actor_id: address.epoch for address in event.members}
        for group in self._groups.values():
            for holder in list(group.mappers):
                # A later incarnation proves that this one is gone, even if no loss was reported.
                if newest.get(holder.actor_id, 0) > holder.epoch:
                    self._forget(holder)

    def _forget(self, address: Address) -> None:
        """Neither this incarnation nor an earlier one holds anything any more."""
        self._seen.pop(address, None)
        for group in self._groups.values():
            for held in (group.mappers, group.answered, group.let_go, group.asked):
                gone = {one for one in held if one.actor_id == address.actor_id and one.epoch <= address.epoch}
                held.difference_update(gone)

    def _on_answered(self, event: Answered, now: float) -> None:
        order: Order = event.tag
        group = self._groups[order.group]
        # The answer to an earlier order: since then the request was taken back, or made again.
        if order.number != group.number:
            return
        expected = HasTakenUp if group.desired is None else HasLetGo
        # By incarnation: a successor's answer does not say what its predecessor still maps.
        if not isinstance(event.message, expected) or event.sender != order.holder:
            self._on_not_done(order, "answered by another incarnation, or not as expected", now)
            return
        group.asked.discard(order.holder)
        group.answered.add(order.holder)
        (group.let_go if group.desired is None else group.mappers).discard(order.holder)
        group.reason = ""

    def _on_not_done(self, order: Order, reason: str, now: float) -> None:
        group = self._groups[order.group]
        if order.number != group.number or order.holder not in group.asked:
            return
        group.asked.discard(order.holder)
        group.reason = f"{order.holder}: {reason}"
        # Not a `Retrier`, which repeats one message until it is answered: here, what to ask and whom depends on the
        # members at that time. One pause for the group, since one missing holder holds up all of it.
        if group.retry_at is None:
            group.retry_at = now + self._retry_s

    def _workers(self, group: _Group) -> list[HolderSeen]:
        return [member for member in self._seen.values() if member.role == WORKER and member.group == group.name]

    def _pending(self, group: _Group) -> list[Address]:
        """Holders that still have to do their part and whose turn it is."""
        if group.desired is None:
            # A member's state comes through the registry, later than its answer: without `let_go`, a resume right after
            # the release would find nobody to wait for, and report that the group has its memory.
            return sorted(
                worker.address
                for worker in self._workers(group)
                if (worker.state == RELEASED or worker.address in group.let_go) and worker.address not in group.answered
            )
        members = {one.address for one in self._seen.values() if one.group == group.name and one.state != RELEASED}
        holders = (members | group.mappers) - group.answered
        workers = {worker.address for worker in self._workers(group)}
        # Workers last: the scheduler gives its attempts back while its worker still answers.
        return sorted(holders - workers) or sorted(holders & workers)

    def _go_on(self, group: _Group) -> None:
        if group.is_changing or not self._knows_members:
            return
        pending = self._pending(group)
        if group.retry_at is None:
            for holder in pending:
                if holder not in group.asked:
                    group.asked.add(holder)
                    # Recorded before its answer: it may map the pool, or let go of it, as soon as it gets the ask.
                    (group.mappers if group.desired is None else group.let_go).add(holder)
                    order = Order(group.name, group.number, holder)
                    message = (
                        TakeUp(group=group.name, number=group.number, pool=self._handle_of(group.name))
                        if group.desired is None
                        else LetGo(group=group.name, number=group.number, weights=group.desired.weights)
                    )
                    self._outbox.ask(holder.actor_id, message, ASK_TIMEOUT_S, order)
        is_unused = not pending and not group.is_copying
        if group.desired is not None and group.desired.is_kv and group.is_there and is_unused:
            group.is_changing = True
            self._outbox.add(FreePool(group.name))

    # state of groups

    def _describe(self, group: _Group) -> GroupMemory:
        pending = self._pending(group)
        if group.desired is None:
            state = RESUMING if pending or not group.is_there else HELD
        elif group.is_changing and not group.is_there:
            state = RESUMING
        elif pending or group.is_copying or not self._knows_members or (group.desired.is_kv and group.is_there):
            state = RELEASING
        else:
            state = RELEASED
        return GroupMemory(
            group=group.name,
            state=state,
            weights="" if group.desired is None else self._weights(group, group.desired),
            pool_bytes=group.num_bytes if group.is_there else 0,
            waiting_for=[holder.actor_id for holder in pending],
            reason=group.reason,
        )

    def _weights(self, group: _Group, desired: DesiredState) -> str:
        """How weights are released. What was kept or backed up ends with its process, and the next one has none."""
        workers = self._workers(group)
        has_weights = {KEEP: [one.has_loaded for one in workers], BACKUP: [one.saver for one in workers]}
        has = has_weights.get(desired.weights, [True])
        return desired.weights if has and all(has) else RELOAD


def _names(message: ReleaseMemory | ResumeMemory | ListMemory) -> Sequence[str]:
    return [] if isinstance(message, ListMemory) else message.groups


def _words(desired: DesiredState) -> str:
    kv = "KV freed" if desired.is_kv else "KV kept"
    return f"{kv}, weights: {desired.weights}"
