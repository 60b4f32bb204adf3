"""Planted bugs in messages that carry several items: each item has to come to its own end."""

from typing import Any

import msgspec

from kvstore.protocol import OpenGrants
from nodes.gateway.service import GatewayService
from nodes.kv_agent.core import AgentCore
from nodes.scheduler.asks import BatchedAsks
from nodes.scheduler.rpc_handlers import RpcHandlers
from tests.simulation.planting import Bug, around, bug

GATHER_S = 0.3


def _open_at_the_second_ask(open_: Any, self: AgentCore, event: Any, now: float) -> Any:
    known = self.__dict__.setdefault("asked_for", set())
    grants = [one for one in event.message.grants if one.grant_id in known]
    known.update(one.grant_id for one in event.message.grants)
    return open_(self, event._replace(message=OpenGrants(grants=grants)), now)


def _take_unnamed_for_done(_: Any, self: BatchedAsks[Any], number: str, done: Any, refused: Any) -> Any:
    return [(name, refused.get(name)) for name in self._named.pop(number, ())]


def _refuse_together(on_submits: Any, self: RpcHandlers, event: Any, message: Any, now: float) -> None:
    on_submits(self, event, message, now)
    reply = self._outbox.commands[-1]
    refused = reply.message.refused
    if refused and reply.message.held:
        for ref in reply.message.held:
            sequence = self._attempts.find(ref.request_id, ref.attempt)
            if sequence is not None:
                self._endings.cancel(sequence, now)
        why = [
            msgspec.structs.replace(refused[0], request_id=r.request_id, attempt=r.attempt) for r in reply.message.held
        ]
        answer = msgspec.structs.replace(reply.message, held=[], refused=[*refused, *why])
        self._outbox.commands[-1] = reply._replace(message=answer)


def _gather_for_longer(flush: Any, self: GatewayService) -> None:
    def release(self: GatewayService) -> None:
        self.__dict__["is_gathering"] = False
        flush(self)

    gathered, self._submits = self._submits, {}
    flush(self)
    self._submits = gathered
    if gathered and not self.__dict__.get("is_gathering"):
        self.__dict__["is_gathering"] = True
        self.ctx.later(GATHER_S, release, self)


OPENED_LATE = around(AgentCore, "_open", _open_at_the_second_ask)
"""Not a bug: an agent may leave out of its answer what it wants to be asked again. Ours names all, others may not."""
GATHERED_LONGER = around(GatewayService, "_flush", _gather_for_longer)
"""Not a bug: attempts of different calls go together, which they seldom do in the simulation's sparse traffic."""
BATCHES_PLANTED: dict[str, Bug] = {
    "what an answer does not name is taken for done": bug(
        0,
        OPENED_LATE,
        around(BatchedAsks, "answered", _take_unnamed_for_done),
    ),
    "one attempt that is refused fails those beside it": bug(
        15,
        GATHERED_LONGER,
        around(RpcHandlers, "_on_submits", _refuse_together),
    ),
}
