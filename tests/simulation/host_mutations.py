"""One planted bug per promise about hosts; the simulation of hosts sees each. How it is done: `planting.py`."""

from typing import Any

from kvstore.transfer.paired import transport
from kvstore.transfer.paired.pair import Finished, Pair
from kvstore.transfer.session import TransferSession
from mesh.membership import registration
from mesh.membership.registration import Registration
from mesh.membership.view import Membership
from nodes.registry import actor as registry
from nodes.registry.core import RegistryCore
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from tests.simulation.mutations import _ignore_lost_senders
from tests.simulation.planting import Bug, around, bug, nothing

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


def _without_looking_for_gaps(
    apply: Any, self: Membership, registry_epoch: int, version: int, upserted: Any, left: Any
) -> Any:
    if registry_epoch == self.registry_epoch and version > self.version:
        self.version = version - 1
    return apply(self, registry_epoch, version, upserted, left)


def members_alone(_newest: Any, self: RegistryCore, actor_id: str) -> int:
    member = self.find(actor_id)
    return member.epoch if member is not None else 0


def _anybody(*_: Any) -> bool:
    return True


PLANTED: dict[str, Bug] = {
    # The pages are given to others while another host still sends into them.
    "a cancelled transfer is over before its bytes are": bug(
        4,
        around(Pair, "cancel", _over_at_once),
        around(Pair, "_finish_current", _once),
        around(Pair, "stopped", _once),
    ),
    # As on one host, the death of the actor that announced them is most often heard of in time.
    "generations are not compared where pages are sent": bug(
        70,
        around(transport, "compare_generations", nothing),
        around(TransferSession, "handle", _ignore_lost_senders),
        around(DecodeHandoffQueue, "on_peer_lost", lambda *_: []),
    ),
    # Its supervisor is gone too, so nobody else says that it is lost.
    "a host that is lost for good stays in the mesh": bug(1, around(RegistryCore, "expire", nothing)),
    "a host that was cut off does not join again": bug(6, around(Registration, "heartbeat", nothing)),
    "a foreign PeerDown is believed": bug(3, around(registration, "is_of_host", _anybody)),
    "a foreign Leave is believed": bug(3, around(registry, "is_of_host", _anybody)),
    "a registry forgets the epochs of who has left": bug(1, around(RegistryCore, "_newest", members_alone)),
    "changes that a cut swallowed are not missed": bug(0, around(Membership, "apply", _without_looking_for_gaps)),
}
