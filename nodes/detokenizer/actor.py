"""The detokenizer process: token frames in, text frames out. Decides nothing; see `core.py`."""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, assert_never

from tokenizers import Tokenizer

from mesh.actor import Actor
from mesh.address import Address
from mesh.runtime.driver import CoreDriver
from mesh.runtime.effects import Tell, Told
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import Codec
from nodes.detokenizer.config import DetokenizerConfig
from nodes.detokenizer.core import (
    Command,
    DetokenizerCore,
    Event,
    LeaseTick,
    MalformedBatch,
    SchedulerLost,
    SendToScheduler,
)
from nodes.detokenizer.incremental import DecoderFactory
from nodes.model_spec import describe_model
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.protocol import TokenBatch
from nodes.redaction import PromptRedactor
from nodes.roles import DETOKENIZER, NODE_CODEC

LEASE_TICKS = 4
"""How often a lease is checked while it lasts."""


class DetokenizerActor(Actor):
    """Has soft state only: schedulers can open their streams again elsewhere, from where this one leaves off."""

    role: ClassVar[str] = DETOKENIZER
    codec: ClassVar[Codec] = NODE_CODEC

    def __init__(self, config: DetokenizerConfig) -> None:
        self._config = config
        self._core: DetokenizerCore | None = None
        self._driver: CoreDriver[Event, Command] | None = None
        self._quiet = asyncio.Event()
        self._drain_timer: asyncio.TimerHandle | None = None
        self._is_ticking = False

    async def start(self) -> None:
        """Raises `nodes.model_spec.ModelError`."""
        self.ctx.metrics.begin("mesh_malformed_batches_total", "mesh_detokenized_tokens_total")
        # A large vocabulary takes a second, during which heartbeats must go on; the simulation has no threads.
        tokenizer = await asyncio.to_thread(self._load) if self._config.use_threads else self._load()
        self._core = DetokenizerCore(DecoderFactory(tokenizer), self._config.limits)
        self._core.note = self.ctx.trace.note
        self._driver = CoreDriver(
            self,
            "detokenizer",
            self._core.handle,
            self._perform,
            refusals=(MalformedBatch,),
            setup={"model": self._config.model, "limits": self._config.limits},
            redact=PromptRedactor,
        )

    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        if not isinstance(message, TokenBatch):
            super().on_tell(sender, message, buffers)
            return
        self._restart_drain_timer()
        try:
            self._handle(Told(sender, message))
        except MalformedBatch as error:
            # Without labels: otherwise any peer that may send batches could make as many series as there is room for.
            self.ctx.metrics.count("mesh_malformed_batches_total")
            self.ctx.log.warning("malformed_token_batch", peer=str(sender), error=str(error))
        else:
            self.ctx.metrics.count("mesh_detokenized_tokens_total", len(message.token_ids))

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        self._handle(SchedulerLost(peer))

    async def drain(self) -> None:
        """Schedulers see `draining` and move their streams; wait until they have."""
        if self._core is None or not self._core.num_streams:
            # One that is being opened just now is opened again elsewhere, as after a death; the wait for it was the
            # longest part of ending an idle mesh.
            return
        self._quiet.clear()
        self._drain_timer = self.ctx.later(self._config.drain_quiet_s, self._quiet.set)
        await self._quiet.wait()

    def stats(self) -> dict[str, float]:
        if self._core is None:
            return {}
        return {
            "mesh_detokenizer_streams": float(self._core.num_streams),
            "mesh_detokenizer_resends_total": float(self._core.num_resends),
            "mesh_detokenizer_dropped_streams_total": float(self._core.num_dropped),
        }

    def _load(self) -> Tokenizer:
        return load_tokenizer(describe_model(self._config.model))

    def _handle(self, event: Event) -> None:
        if self._core is None or self._driver is None:
            return
        self._driver.feed(event)
        if not self._is_ticking and self._core.num_streams:
            self._is_ticking = True
            self.ctx.later(self._config.limits.lease_s / LEASE_TICKS, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        self._handle(LeaseTick())

    def _perform(self, command: Command) -> None:
        match command:
            case Tell(gateway, message):
                self.ctx.tell(gateway, message)
            case SendToScheduler(scheduler, message):
                member = self.ctx.members.get(scheduler.actor_id)
                # Stream numbers mean nothing to the next incarnation.
                if member is None or member.epoch == scheduler.epoch:
                    self.ctx.tell(scheduler.actor_id, message, channel=Channel.CONTROL)
            case _:
                assert_never(command)

    def _restart_drain_timer(self) -> None:
        if self._drain_timer is not None and not self._quiet.is_set():
            self._drain_timer.cancel()
            self._drain_timer = self.ctx.later(self._config.drain_quiet_s, self._quiet.set)
