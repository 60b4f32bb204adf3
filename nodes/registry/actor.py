"""The registry as an actor: mesh membership, at the address written in the run directory.

Every actor joins here, renews its lease by heartbeat, and is told every change; `nodes/registry/core.py` decides.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from mesh.actor import Actor, Call
from mesh.address import Address, Endpoint, host_of
from mesh.errors import (
    JOIN_CODES,
    NO_PROOF,
    PROOF_CODES,
    REGISTRY_FULL,
    STALE_EPOCH,
    WRONG_EPOCH,
    WRONG_MESH,
    WRONG_SPEC,
    FrameRefused,
)
from mesh.link.peer import Peer
from mesh.membership.proof import without_proof
from mesh.membership.spec import spec_faults
from mesh.membership.view import READY, SUPERVISOR, Bootstrap, is_of_host
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.telemetry import series
from mesh.transport.base import Channel
from mesh.wire.codec import Codec
from mesh.wire.frames import (
    Heartbeat,
    Join,
    Leave,
    Left,
    ListMembers,
    Members,
    MembersChanged,
    Ping,
    Renewed,
)
from nodes.registry.config import RegistryConfig
from nodes.registry.core import RegistryCore, Stale
from nodes.registry.later_epoch import LaterEpoch
from nodes.registry.pending_changes import PendingChanges
from nodes.registry.roll import Roll

if TYPE_CHECKING:
    import asyncio

ROLE: Final = "registry"
_CHECK_S: Final = 1.0
"""The most between two looks at leases and at the file that says where the registry is. A lease that ends sooner is
looked at when it does."""
_PAUSE_S: Final = 0.5
"""A look that comes so late means that the registry itself stood still: what was not renewed meanwhile is forgiven."""
_MAX_DOUBTED: Final = 1024
"""100 KB; the actors of a mesh are hundreds. Refusals are counted beyond it."""
_GATHER_S: Final = 0.02
"""Pause between two rounds of telling changes. A death is told at once, unless a round has just ended."""
_REST_FOR_READER_S: Final = 40e-6
"""Four times what a round takes for each reader, about 10 µs; see `_MAX_GATHER_S`."""
_REST_FOR_ENTRY_S: Final = 1e-6
"""The same for each entry that a reader is told."""
_MAX_GATHER_S: Final = 0.25
"""Longest pause. After a large round the pause is about four times as long as the round: the registry has to answer
heartbeats, too."""


class RegistryActor(Actor):
    """Owns the leases of all members. Its state is soft: members bring along again whatever is lost with it.

    Args:
        run_directory: where to write the address of the live registry; None if members find it another way.
        lease_s: how long a membership lasts without renewal.
        release: version of this software, for clients that check whether theirs is the same.
        config: what hosts of the mesh have in common, on a mesh of several.
    """

    role = ROLE
    codec = Codec(Ping)
    system_asks = (Join, Leave, ListMembers)
    joins = False

    def __init__(
        self,
        run_directory: RunDirectory | None = None,
        *,
        lease_s: float = 5.0,
        release: str = "",
        config: RegistryConfig | None = None,
    ) -> None:
        self._run_directory = run_directory
        self._mesh = run_directory.mesh if run_directory is not None else ""
        self._release = release
        self._config = config or RegistryConfig()
        self._told: Bootstrap | None = None
        self._doubted: set[str] = set()
        self._lease_s = lease_s
        self._core: RegistryCore | None = None
        self._later_epoch = LaterEpoch(0.0, lease_s)
        self._check_at = 0.0
        self._pending = PendingChanges(1)
        self._telling: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._rest_s = _GATHER_S
        # Members that got a snapshot since the last round of telling, and its version.
        self._ahead: dict[Address, int] = {}
        self._unwritten = ""
        self._has_stopped = False

    @property
    def core(self) -> RegistryCore:
        assert self._core is not None, "the registry has not started yet"
        return self._core

    async def start(self) -> None:
        ctx = self.ctx
        ctx.metrics.begin("mesh_members_refused_total", code=(*PROOF_CODES, *JOIN_CODES))
        if self._run_directory is not None:
            self._told = self._run_directory.bootstrap(ctx.credentials.secret)
        self._core = RegistryCore(
            ctx.address.epoch, self._lease_s, ctx.now(), ctx.credentials.check, ctx.credentials.may_vouch
        )
        self._later_epoch = LaterEpoch(ctx.now(), self._lease_s)
        me = msgspec.structs.replace(ctx.describe(), state=READY)
        self._core.admit(me)
        self._roll = Roll(me)
        self._check_soon(ctx.now())
        self._say_where()

    async def stop(self) -> None:
        """Tell the remaining changes: links are closed next, and nothing is told or written after that."""
        self._has_stopped = True
        if self._telling is not None:
            self._telling.cancel()
            self._tell_pending()

    def on_ask(self, call: Call) -> None:
        core = self.core
        match call.message:
            case Join():
                self._join(call, call.message)
            case Leave(actor_id=actor_id, epoch=epoch, reason=reason):
                self._leave(call, Address(actor_id, epoch), reason)
            case ListMembers():
                members = [without_proof(member) for member in core.members()]
                call.reply(
                    Members(
                        members=members,
                        mesh=self._mesh,
                        release=self._release,
                        spec=self._config.spec,
                        settings=self._config.settings,
                    )
                )
            case _:
                super().on_ask(call)

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        """A heartbeat renews the lease; `heartbeat_to` tells a peer that has none."""
        self.core.renew(peer, self.ctx.now())

    def heartbeat_to(self, peer: Peer, renewed: Sequence[Renewed] = ()) -> Heartbeat:
        """What a member needs to detect that it has missed a change, and a supervisor of its actors."""
        core, address = self.core, peer.address
        version = self._ahead.get(address, self._pending.version)
        unknown = self._renew(peer, renewed) if renewed else []
        return Heartbeat(registry_epoch=core.epoch, version=version, known=core.knows(address), unknown=unknown)

    def waning(self) -> list[Address]:
        # The first heartbeat goes out before the start.
        return self._core.waning(self.ctx.now()) if self._core is not None else []

    def _renew(self, by: Peer, renewed: Sequence[Renewed]) -> list[str]:
        """Renew the leases of a supervisor's own actors. Returns those of them that hold none."""
        core, now, host = self.core, self.ctx.now(), host_of(by.address.actor_id)
        sender = core.find(by.address.actor_id)
        is_supervisor = sender is not None and sender.address == by.address and sender.role == SUPERVISOR
        if not (is_supervisor and self.ctx.credentials.believe(by.address, is_proved=by.is_proved)):
            self._refused(by.address, FrameRefused(NO_PROOF, f"{by.address} may not renew what others hold"))
            return []
        own = [one for one in renewed if is_of_host(one.actor_id, core.find(one.actor_id), host)]
        return [
            one.actor_id
            for one in own
            if not core.renew_for(Address(one.actor_id, one.epoch), now - one.age_ms / 1000.0)
        ]

    def is_outlived(self, by: Address, epoch: int) -> bool:
        """One host alone does not end a registry that others have joined."""
        joined = [member.actor_id for member in self.core.audience()]
        may_vouch = self.ctx.credentials.may_vouch(by.actor_id)
        if may_vouch and self._later_epoch.is_believed(
            epoch, by.actor_id, self.ctx.describe().host, joined, self.ctx.now()
        ):
            return True
        why = f"{by} dials registry epoch {epoch}, which too few other hosts confirm: restart the host of {by}"
        self._refused(by, FrameRefused(WRONG_EPOCH, why))
        return False

    def stats(self) -> dict[str, float]:
        counts: dict[str, float] = {}
        for member in self.core.members():
            # Not `role`, which on the page of all actors is that of the registry.
            key = series("mesh_registry_members", {"member_role": member.role})
            counts[key] = counts.get(key, 0.0) + 1
        return counts

    def _join(self, call: Call, request: Join) -> None:
        if request.member.address != call.sender:
            call.fail("bad_request", "an actor may only join as itself", param="member")
            return
        try:
            self._check_mesh(request, call.sender)
            self._roll.require_room(request.member)
            # Changes still pending reach the joiner in the next round: a second snapshot for each joiner would double
            # the bytes of a start.
            outcome = self.core.join(request, self.ctx.now(), self._pending.version)
        except Stale as error:
            call.fail(STALE_EPOCH, str(error), known_epoch=error.known_epoch)
            return
        except FrameRefused as refusal:
            self._refused(call.sender, refusal)
            # Anything else has to be corrected first.
            call.fail(refusal.code, refusal.message, retryable=refusal.code == REGISTRY_FULL)
            return
        for address, doubt in outcome.doubted:
            self._refused(address, doubt)
        joined = outcome.joined
        if joined.members is not None:
            self._ahead[call.sender] = joined.version
        self._tell_all(outcome.change)
        if joined.members is not None:
            joined = msgspec.structs.replace(joined, members=self._roll.shown_to(request.member))
        call.reply(joined)

    def _check_mesh(self, request: Join, sender: Address) -> None:
        """Raise FrameRefused for a joiner that is meant for another mesh, or whose host has another spec of it."""
        if request.mesh and self._mesh and request.mesh != self._mesh:
            raise FrameRefused(
                WRONG_MESH,
                f"{sender} belongs to mesh {request.mesh!r}, but the registry it found belongs to mesh {self._mesh!r}: "
                "correct the registry's address or port in the topology file, or the mesh's name",
            )
        faults = spec_faults(request.spec, self._config.spec)
        if faults:
            raise FrameRefused(
                WRONG_SPEC,
                f"the host of {sender} does not fit the mesh: {'; '.join(faults)}: start it with the mesh's own "
                "topology file, or with `meshctl up --join TOKEN`",
            )

    def _leave(self, call: Call, address: Address, reason: str) -> None:
        core, credentials = self.core, self.ctx.credentials
        is_its = is_of_host(address.actor_id, core.find(address.actor_id), host_of(call.sender.actor_id))
        is_known = is_its and credentials.believe(call.sender, is_proved=call.peer.is_proved)
        if address != call.sender and not is_known:
            refusal = FrameRefused(NO_PROOF, f"{call.sender} may not report that {address} leaves")
            self._refused(call.sender, refusal)
            call.fail(refusal.code, refusal.message)
            return
        self._tell_all(core.leave(address, reason))
        call.reply(Left())

    def _refused(self, address: Address, refusal: FrameRefused) -> None:
        self.ctx.metrics.count("mesh_members_refused_total", code=refusal.code)
        # A stranger that invents actor ids must not fill the log.
        if address.actor_id not in self._doubted and len(self._doubted) < _MAX_DOUBTED:
            self._doubted.add(address.actor_id)
            self.ctx.log.warning("member_refused", member=str(address), code=refusal.code, why=refusal.message)

    def _check(self) -> None:
        if self._has_stopped:
            return
        now = self.ctx.now()
        if now - self._check_at > _PAUSE_S:
            self.core.forgive(now)
        self._tell_all(self.core.expire(now))
        if self._told is not None and self._is_wrong(self._told.lookup()):
            if not self._unwritten:
                self.ctx.log.warning(
                    "registry_file_lost", why="new actors could not find the registry", then="the file is written again"
                )
            self._say_where()
        self._check_soon(now)

    def _check_soon(self, now: float) -> None:
        self._check_at = min(now + _CHECK_S, max(now, self.core.next_expiry()))
        self.ctx.later(self._check_at - now, self._check)

    def _is_wrong(self, told: tuple[Address, Endpoint] | None) -> bool:
        ours = self.ctx.address, self.ctx.endpoint
        # A later incarnation's word stands.
        return told is None or (told != ours and told[0].epoch <= ours[0].epoch)

    def _say_where(self) -> None:
        if self._run_directory is None:
            return
        try:
            self._run_directory.write_registry(self.ctx.address, self.ctx.endpoint, self.ctx.describe().proof)
            self._unwritten = ""
        except OSError as error:
            # Members go on. For newcomers, writing is retried at each check; the error is logged once.
            if str(error) != self._unwritten:
                self._unwritten = str(error)
                self.ctx.log.error(
                    "registry_file_unwritten", why=str(error), do="free space in the run directory, or make it writable"
                )

    def _tell_all(self, change: MembersChanged | None) -> None:
        """Tell a change at once, or together with others if a round was just told."""
        if change is None or self._has_stopped:
            return
        self._roll.take(change)
        self._pending.add(change)
        if self._telling is None:
            wait_s = self._told_at + self._rest_s - self.ctx.now()
            if wait_s <= 0.0:
                self._tell_pending()
            else:
                self._telling = self.ctx.later(wait_s, self._tell_pending)

    def _tell_pending(self) -> None:
        """Tell all gathered changes. A member that misses them detects it by the version in the next heartbeat."""
        self._telling, self._told_at = None, self.ctx.now()
        change = self._pending.take()
        if change is None:
            return
        readers = [
            member
            for member in self.core.audience()
            if member.address != self.ctx.address and self._ahead.get(member.address) != change.version
        ]
        for actor_ids, upserted in self._roll.shown_alike(readers, change.upserted):
            told = msgspec.structs.replace(change, upserted=upserted)
            self.ctx.tell_all(actor_ids, told, channel=Channel.CONTROL)
        num_entries = len(change.upserted) + len(change.left)
        rest_s = len(readers) * (_REST_FOR_READER_S + num_entries * _REST_FOR_ENTRY_S)
        self._rest_s = min(max(_GATHER_S, rest_s), _MAX_GATHER_S)
        self._ahead.clear()
