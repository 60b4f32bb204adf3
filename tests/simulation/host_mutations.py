"""Planted bugs in what becomes of hosts, their keys and files, of strangers, and of drained and released groups.

By the suite that has to see them; how they are planted, and why by private names: `mutations.py`.
"""

import os
from typing import Any

from cli.supervisor.hosts import allow_list
from cli.supervisor.hosts.allow_list import AllowListPush, Telling
from kvstore.transfer.paired import transport
from kvstore.transfer.paired.pair import Finished, Pair
from mesh.calls import persistent_ask
from mesh.membership import registration
from mesh.membership.heartbeats import Heartbeats
from mesh.membership.proof import Credentials, HostSecret
from mesh.membership.registration import Registration
from mesh.membership.renewals import Renewals
from mesh.membership.view import Membership
from mesh.supervision.core import Supervisor
from mesh.transport.guard import Guard
from mesh.wire.frames import Renewed
from nodes.kv_agent.memory import actions
from nodes.kv_agent.memory.actions import MemoryActions
from nodes.kv_agent.memory.core import MemoryCore
from nodes.kv_agent.pools.held import HeldPools
from nodes.protocol.memory import HasLetGo
from nodes.registry import actor as registry
from nodes.registry.actor import RegistryActor
from nodes.registry.core import RegistryCore
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.worker_link.worker_drain import WorkerDrain
from nodes.worker.actor import WorkerActor
from tests.simulation.hosted_mesh import HEAD
from tests.simulation.mutations import LEASES_FOR_EVER, SOURCES_LIVE, altered
from tests.simulation.planting import bug, meanwhile, no_items, nothing, returns

_ENDED = "_ended_early"


def _over_at_once(cancel: Any, self: Pair, number: int, error: Any) -> Any:
    current = self._current
    if current is None or current.number != number or current.error is not None:
        return cancel(self, number, error)
    current.error = error
    vars(self).setdefault(_ENDED, set()).add(number)
    return [Finished(number, error)]


def _once(end: Any, self: Pair) -> Any:
    ended = vars(self).get(_ENDED, ())
    return [one for one in end(self) if not (isinstance(one, Finished) and one.number in ended)]


def _without_looking_for_gaps(apply: Any, self: Membership, registry_epoch: int, version: int, *more: Any) -> Any:
    if registry_epoch == self.registry_epoch and version > self.version:
        self.version = version - 1
    return apply(self, registry_epoch, version, *more)


def _members_alone(_newest: Any, self: RegistryCore, actor_id: str) -> int:
    member = self.find(actor_id)
    return member.epoch if member is not None else 0


def _without_looking_at_versions(heartbeat: Any, self: Registration, peer: Any, beat: Any) -> None:
    heartbeat(self, peer, altered(beat, registry_epoch=self.view.registry_epoch, version=self.view.version))


EPOCHS_FORGOTTEN = (RegistryCore, "_newest", _members_alone)

HOSTS = {
    # The pages are given to others while another host still sends into them.
    "a cancelled transfer is over before its bytes are":
        bug(34, (Pair, "cancel", _over_at_once), (Pair, "_finish_current", _once), (Pair, "stopped", _once)),
    "generations are not compared where pages are sent":
        bug(84, (transport, "compare_generations", nothing), *SOURCES_LIVE),
    # Its supervisor is gone too, so nobody else says that it is lost.
    "a host that is lost for good stays in the mesh": bug(1, LEASES_FOR_EVER),
    "a host that was cut off does not join again": bug(6, (Registration, "heartbeat", nothing)),
    "who has lost its supervisor renews nothing": bug(95, (Heartbeats, "_is_linked", returns(True))),
    "a foreign PeerDown is believed": bug(7, (registration, "is_of_host", returns(True))),
    "a foreign Leave is believed": bug(3, (registry, "is_of_host", returns(True))),
    "a registry forgets the epochs of who has left": bug(1, EPOCHS_FORGOTTEN),
    # The second guard: the version that comes with each heartbeat.
    "changes that a cut swallowed are not missed":
        bug(6, (Membership, "apply", _without_looking_for_gaps),
            (Registration, "heartbeat", _without_looking_at_versions)),
}  # fmt: skip


def _of_any_version(take: Any, self: AllowListPush, sender: Any, message: Any) -> Any:
    if message.allowed.version < self._keys.allowed.version:
        self._keys.write(message.allowed)
    return take(self, sender, message)


KEYS = {
    "an earlier list replaces a later one": bug(2, (AllowListPush, "take", _of_any_version)),
    "who did not answer is not told again":
        bug(12, (Telling, "answered", lambda answered, self, address, version:
            answered(self, address, 1 << 40 if version is None else version))),
    "what a revoked key sends is taken": bug(7, (Guard, "vet", nothing)),
    "any supervisor says whose keys are taken": bug(1, (allow_list, "host_of", returns(HEAD))),
    "a host of another spec is taken": bug(0, (registry, "spec_faults", no_items)),
    "any host says which incarnations others have": bug(0, (Credentials, "may_vouch", returns(True))),
}  # fmt: skip


def _all_that_ever_came(due: Any, self: Renewals, now: float) -> list[Renewed]:
    return [Renewed(actor_id, heard.epoch, 0) for actor_id, heard in self._heard.items()]


def _as_if_heard_now(due: Any, self: Renewals, now: float) -> list[Renewed]:
    return [altered(one, age_ms=0) for one in due(self, now)]


def _nobody_is_behind(heard: Any, self: Renewals, *given: Any) -> bool:
    heard(self, *given)
    return False


def _watched(receive: Any, self: Heartbeats, peer: Any, *frame: Any) -> None:
    receive(self, peer, *frame)
    peer.is_watched = True


LEASES = {
    # That the link of who is silent is lost is the other guard.
    "the supervisor renews whom it has not heard from":
        bug(0, (Renewals, "due", _all_that_ever_came), (Renewals, "lost", nothing)),
    "a lease counts from its renewal": bug(0, (Renewals, "due", _as_if_heard_now)),
    "nobody else is asked when the supervisor stands still": bug(1, (RegistryActor, "waning", no_items)),
    "who is behind is not told": bug(33, (Renewals, "heard", _nobody_is_behind)),
    "who renews for others is missed between two renewals": bug(35, (Heartbeats, "_on_heartbeat", _watched)),
}  # fmt: skip


def _not_told(spawn: Any, self: Supervisor, watch: Any) -> None:
    watch.known_epoch = 0
    spawn(self, watch)


def _from_one(spawn: Any, self: Supervisor, watch: Any) -> None:
    watch.epoch = 0
    spawn(self, watch)


FROM_A_LOST_FILE = (Supervisor, "_spawn", _from_one)
RETURNS = {
    "the epoch that a refusal names is not heard": bug(5, (Supervisor, "_spawn", _not_told)),
    "a registry forgets the epochs of who has left": bug(16, EPOCHS_FORGOTTEN),
    "grants are named by epoch and count alone": bug(0, (os, "urandom", lambda _, count: bytes(count))),
    "epochs are counted from a lost file": bug(0, FROM_A_LOST_FILE, EPOCHS_FORGOTTEN),
}

STRANGERS = {
    "a foreign Leave is believed": bug(0, (Credentials, "believe", returns(True))),
    # The sender's role is the other guard.
    "a foreign PeerDown is believed":
        bug(0, (Credentials, "believe", returns(True)), (Registration, "may_say_dead", returns(True)),
            (RegistryActor, "_leave", nothing)),
    "hearsay without a proof is believed": bug(1, (RegistryCore, "_believe", meanwhile(0, "_check", returns(nothing)))),
    "whoever says hello is who he says": bug(0, (Credentials, "vet", returns(False))),
    "a proof is good for every epoch":
        bug(0, (HostSecret, "prove", lambda prove, self, actor_id, _epoch, role: prove(self, actor_id, 0, role))),
}  # fmt: skip


DRAINS = {
    "a drained worker is waited for like one that died": bug(0, (WorkerDrain, "on_members", nothing)),
    "what a drained worker was computing is kept": bug(0, (WorkerDrain, "on_due", nothing)),
    "who stays away is waited for like one that is renewed":
        bug(2, (WorkerDrain, "on_members", lambda on, self, event, now: on(self, event._replace(drained={}), now))),
    "a worker that was renewed is taken for drained":
        bug(8, (WorkerDrain, "on_members", lambda on, self, event, now: on(self, event._replace(ready={}), now))),
    "who does not serve a question has the last word": bug(0, (persistent_ask, "NOT_SERVED", "nothing like it")),
}  # fmt: skip


def _under_steps(stop_steps: Any, self: WorkerActor, *, is_stopped: bool) -> bool:
    stop_steps(self, is_stopped=is_stopped)
    return False


RELEASES = {
    "a pool is freed under those who map it":
        bug(0, (MemoryCore, "_pending", lambda of, self, group: of(self, group) if group.desired is None else [])),
    "who let go is not asked to take up":
        bug(3, (MemoryCore, "_pending", lambda of, self, group: of(self, group) if group.desired is not None else [])),
    "the next agent does not know the desired state":
        bug(21, (actions, "_facts", lambda facts, ranks: facts(ranks)._replace(desired=None))),
    "a holder that died is waited for": bug(15, (MemoryCore, "_forget", nothing)),
    "a scheduler keeps what it is asked to give back":
        bug(0, (SchedulerActor, "_let_go", lambda _, self, call, order:
            call.reply(HasLetGo(group=order.group, number=order.number)))),
    "a worker releases its memory under a step": bug(27, (WorkerActor, "stop_steps", _under_steps)),
    "only the first rank's pool is freed":
        bug(0, (actions, "free_pools", lambda free, host, prefix, pools: [*free(host, prefix, pools[:1]), *pools[1:]])),
    "copies go on from pools that are wanted back": bug(38, (HeldPools, "stop_copies", nothing)),
    "the desired state is not written down": bug(0, (MemoryActions, "_mark", nothing)),
}  # fmt: skip
"""Seen where memory is released; the seeds of `mutations.py` release nothing.

Left out is what a second guard hides in host memory: a copy from a pool that was freed too early finds it closed, and
orders and answers of an earlier state come late only over links that end with their sender. Tests of the cores have
those.
"""
