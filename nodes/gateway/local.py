"""A gateway without HTTP: whoever has it in the process drives its service. A simulation does, and an `Engine`."""

from collections.abc import Sequence
from typing import Any, ClassVar

from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.membership.view import Member
from mesh.transport.base import Buffer
from mesh.wire.codec import Codec
from mesh.wire.frames import PeerDown
from nodes.actor_figures import CALLS_IN_FLIGHT
from nodes.gateway.config import GatewayConfig
from nodes.gateway.control.aborts import Aborts
from nodes.gateway.requests.events import GroupAway
from nodes.gateway.service import DrawSeed, GatewayService, draw_secret_seed
from nodes.protocol import AbortRequests, AttemptFailed, Pooled, PromptRead, RequestsAborted, TextBatch, WorkerAway
from nodes.protocol.records import CallsFound, FindCalls
from nodes.roles import GATEWAY, NODE_CODEC


class LocalGateway(Actor):
    """Owns the request log.

    Args:
        config: see `GatewayConfig`.
        draw_seed: draws the seed of a call that brings none; a simulation passes a repeatable one.
    """

    role: ClassVar[str] = GATEWAY
    codec: ClassVar[Codec] = NODE_CODEC
    kept: ClassVar[tuple[str, ...]] = (
        "mesh_gateway_requests_running", "mesh_gateway_requests_waiting",
        "mesh_time_to_first_token_seconds", "mesh_inter_token_latency_seconds",
    )  # fmt: skip

    def __init__(self, config: GatewayConfig, *, draw_seed: DrawSeed = draw_secret_seed) -> None:
        self.config = config
        self._draw_seed = draw_seed
        self._service: GatewayService | None = None
        self._aborts: Aborts | None = None

    @property
    def service(self) -> GatewayService:
        assert self._service is not None, "the gateway was used before it started"
        return self._service

    async def start(self) -> None:
        service = self._service = GatewayService(self.ctx, self.config, self._draw_seed)
        self._aborts = Aborts(self.ctx, service)
        service.on_members(self.ctx.members.all())

    def on_ask(self, call: Call) -> None:
        if isinstance(call.message, AbortRequests):
            # Before the start there is nothing to be aborted.
            call.reply(RequestsAborted(num=self._aborts.here(call.message) if self._aborts else 0))
        elif isinstance(call.message, FindCalls):
            call.reply(self._service.find_calls(call.message) if self._service else CallsFound(calls=[]))
        else:
            super().on_ask(call)

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, TextBatch | PromptRead | Pooled | AttemptFailed):
            self.service.handle(message)
        elif isinstance(message, WorkerAway):
            self.service.handle(GroupAway(sender.actor_id, message.returns_in_s, message.suspects))
        else:
            super().on_tell(sender, message, buffers)

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        if self._service is not None:
            self._service.on_peer_lost(peer.actor_id, peer.epoch, reason)

    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        if self._service is not None:
            self._service.account.died(down.actor_id, down.epoch, down.reason)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        if self._service is not None:
            self._service.on_members([*joined, *left, *changed])

    async def drain(self) -> None:
        """Finish what is here; new calls get a 503."""
        self.service.door.begin_drain(turn_away=True)
        await self.service.door.emptied()

    async def stop(self) -> None:
        if self._service is not None:
            self._service.stop()
            await self._service.account.close()

    def stats(self) -> dict[str, float]:
        if self._service is None:
            return {}
        core = self._service.core
        return self._service.account.figures() | {
            CALLS_IN_FLIGHT: float(self._service.door.num_calls),
            "mesh_gateway_clients": float(len(self._service.door.in_flight)),
            "mesh_gateway_over_share_total": float(self._service.door.num_over_share),
            "mesh_gateway_requests_running": float(core.num_requests - core.num_waiting),
            "mesh_gateway_requests_waiting": float(core.num_waiting),
            "mesh_gateway_cancels_inflight": float(core.num_cancels),
            "mesh_gateway_retries_total": float(core.num_retries),
            "mesh_gateway_moves_total": float(core.moves.num_moves),
            "mesh_gateway_resends_total": float(core.resends.num_resends),
            "mesh_gateway_stale_outputs_total": float(core.num_refused),
            "mesh_numerics_changes_total": float(core.num_numerics_changes),
        }
