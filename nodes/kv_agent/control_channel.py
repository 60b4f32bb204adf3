"""Carries messages between the two agents of a pair, from their transports to the mesh and back.

Asks are made and answered here; `kvstore/transfer/paired/transport.py` decides what they say. Used by `actor.py`.
"""

from collections.abc import Callable

from typing_extensions import override

from kvstore.errors import TransferError
from kvstore.protocol import ClosePair, OfferPair, PagesSent, PairAccepted, SendPages
from kvstore.transfer.paired.orders import ControlChannel, Inbox, Paired
from mesh.actor import Actor, Call
from mesh.errors import CallError


class MeshChannel(ControlChannel):
    """The channel as messages of the mesh. `wake` is called after each one, so that transports are polled."""

    def __init__(self, actor: Actor, wake: Callable[[], None]) -> None:
        self._actor = actor
        self._wake = wake
        self.inbox = Inbox()

    @override
    def attach(self, transport: Paired) -> None:
        self.inbox.transports.append(transport)

    @property
    @override
    def name(self) -> str:
        """Address and epoch of the agent."""
        return str(self._actor.ctx.address)

    @override
    def now(self) -> float:
        return self._actor.ctx.now()

    @override
    def offer(self, agent: str, offer: OfferPair) -> None:
        self._actor.ctx.spawn(self._offer(agent, offer), name=f"offer {offer.pair}")

    @override
    def order(self, agent: str, order: SendPages) -> None:
        self._actor.ctx.spawn(self._order(agent, order), name=f"order {order.pair}")

    @override
    def close(self, agent: str, pair: str) -> None:
        """If the tell is lost, the other end notices at its own deadline, or when this agent is gone."""
        self._actor.ctx.tell(agent, ClosePair(pair=pair))

    def on_ask(self, call: Call) -> None:
        message, agent = call.message, call.sender.actor_id
        if isinstance(message, OfferPair):
            try:
                self.inbox.take_offer(agent, message)
            except TransferError as error:
                call.fail(error.code, error.message)
            else:
                call.reply(PairAccepted(pair=message.pair))
        elif isinstance(message, SendPages):
            self.inbox.take_order(agent, message, call.reply)
        self._wake()

    async def _offer(self, agent: str, offer: OfferPair) -> None:
        try:
            await self._actor.ctx.ask(agent, offer, timeout_s=offer.timeout_s)
        except CallError as error:
            self.inbox.pair_failed(offer.pair, error.code, f"no pair with {agent}: {error.message}")
        self._wake()

    async def _order(self, agent: str, order: SendPages) -> None:
        try:
            answer = (await self._actor.ctx.ask(agent, order, timeout_s=order.timeout_s)).message
        except CallError as error:
            self.inbox.pair_failed(order.pair, error.code, f"{agent} did not send: {error.message}")
        else:
            if isinstance(answer, PagesSent):
                self.inbox.sent(answer)
            else:
                told = f"{agent} answered SendPages with {type(answer).__name__}"
                self.inbox.pair_failed(order.pair, "bad_answer", told)
        self._wake()
