"""One incarnation of an actor: what it says of itself, whom it believes, where it finds others, and when it is over.

Owned by `ActorSystem`.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import msgspec

from mesh.address import Address, Endpoint
from mesh.errors import MeshError, Superseded
from mesh.handlers import Handlers
from mesh.membership.proof import REGISTRY, Credentials, without_proof
from mesh.membership.view import DRAINING, Bootstrap, LearningBootstrap, Member, Membership
from mesh.options import SystemOptions


class Incarnation:
    """A `Directory` for its links. `announce` calls what is set as `when_announced` and `when_state_changed`."""

    when_announced: Callable[[], object]
    when_state_changed: Callable[[], object]

    def __init__(self, address: Address, actor: Handlers, options: SystemOptions, bootstrap: Bootstrap) -> None:
        self.address = address
        self.view = Membership()
        self.log = options.log_of(address)
        self.bootstrap = LearningBootstrap(bootstrap)
        self.credentials = Credentials(options.secret, options.proof, self.view.get, self._known_hubs, options.vet_host)
        self.vet = self.credentials.vet
        self.over: MeshError | None = None
        """Why this incarnation is over: the registry will never admit it, or a core of it has failed. None: it is not,
        or was asked to end."""
        self._actor = actor
        self._supervisor = options.supervisor
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._member = Member(
            actor_id=address.actor_id,
            role=actor.role,
            epoch=address.epoch,
            endpoint=Endpoint("", ""),
            host=options.host,
            pid=options.pid or os.getpid(),
            attributes=options.attributes,
            proof=self.credentials.own(*address, actor.role),
        )

    def describe(self) -> Member:
        return self._member

    def introduce(self, to: Address, *, is_proved: bool) -> Member:
        """This actor as a member, with its proof if the peer is proved, a hub, or a member known to have a proof."""
        return self._member if is_proved or self.credentials.are_shown_to(to) else without_proof(self._member)

    def listens(self, endpoint: Endpoint) -> None:
        self._member = msgspec.structs.replace(self._member, endpoint=endpoint)

    def announce(self, state: str | None = None, **attributes: Any) -> None:
        """A new state (a draining actor never becomes ready again), or attributes to merge into the existing ones."""
        member = self._member
        if state is None or member.state == DRAINING:
            state = member.state
        self._member = msgspec.structs.replace(member, state=state, attributes={**member.attributes, **attributes})
        self.when_announced()
        if state != member.state:
            self.when_state_changed()

    def locate(self, actor_id: str) -> tuple[Address, Endpoint] | None:
        """From bootstrap, options or view. Actors on the same host are dialed by local endpoints, not the network."""
        # The options and files that name these two hold local endpoints only on the host these belong to.
        for known in (self._supervisor, self.bootstrap.lookup()):
            if known is not None and known[0].actor_id == actor_id:
                return known[0], known[1].on_its_host
        member = self.view.get(actor_id)
        if member is None:
            return None
        is_near = member.host == self._member.host
        return member.address, member.endpoint.on_its_host if is_near else member.endpoint

    def end(self, reason: str, why: MeshError | None = None) -> bool:
        """Have the program that runs this actor end it, with `why` as an error. False: this was requested before."""
        if self._end.done():
            return False
        self.over = why
        self._end.set_result(reason)
        return True

    async def end_asked(self) -> str:
        return await asyncio.shield(self._end)

    def superseded(self, by: Address, reason: str, known_epoch: int, is_proved: bool) -> None:
        """A peer knows a later incarnation of this actor. If the registry says so, this one is over.

        A registry believes any peer that may have been its member: otherwise a registry that has lost both its files
        and the right time would be dialed by its earlier epoch for ever, and by nobody under its present one.
        """
        # The next incarnation is started above `known_epoch`. Without it an actor whose host has lost its files, or
        # whose clock is a day behind, would be refused until the lease of its predecessor had run out, and would then
        # reuse epochs that the predecessor has had.
        self.is_over(by, Superseded(reason, known_epoch), is_proved=is_proved)

    def is_over(self, by: Address, why: MeshError, *, is_proved: bool = False) -> None:
        """A peer, believed if it is the registry, says that this incarnation will never be admitted (again)."""
        registry = self.bootstrap.lookup()
        known_epoch = why.known_epoch if isinstance(why, Superseded) else 0
        is_said = registry is not None and registry[0] == by
        if self._actor.role == REGISTRY:
            is_said = self.credentials.believe(by, is_proved=is_proved) and self._actor.is_outlived(by, known_epoch)
        if is_said and self.end(why.code, why):
            self.log.warning(why.code, by=str(by), why=why.message, known_epoch=known_epoch)

    def _known_hubs(self) -> list[str]:
        return [known[0].actor_id for known in (self._supervisor, self.bootstrap.lookup()) if known is not None]
