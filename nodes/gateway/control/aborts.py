"""Ends requests by what their clients call them, at whichever gateway they are.

    POST /abort_request --> a gateway --AbortRequests--> every other gateway

Gateways share a port, so an abort may reach another one than its request did. Every gateway is asked each time: who
answers sooner when a name is known would tell whose requests there are.
"""

import asyncio
from typing import Final

from mesh.actor import Context
from mesh.errors import CallError
from nodes.gateway.errors import Unavailable
from nodes.gateway.service import GatewayService
from nodes.protocol import AbortRequests, RequestsAborted
from nodes.roles import GATEWAY

_ASK_S: Final = 2.0
"""A gateway answers in its next turn; one that does not for so long hangs, and is about to be killed."""
_TRIES: Final = 3
"""In all less than the 10 s after which some clients take a request for lost."""
_PAUSE_S: Final = 0.2
"""Within it a supervisor's word of a death has come: then there is nothing left to be aborted."""


class Aborts:
    """What one gateway ends, and has others end."""

    def __init__(self, ctx: Context, service: GatewayService) -> None:
        self._ctx = ctx
        self._service = service

    def here(self, wish: AbortRequests) -> int:
        """End those that are here; how many were."""
        named = self._service.named
        if wish.everybody:
            return self._service.end_aborted(named.abort_all(None))
        if not wish.rid:
            return self._service.end_aborted(named.abort_all(wish.owner))
        return self._service.end_aborted(named.abort(wish.owner, wish.rid))

    async def everywhere(self, wish: AbortRequests) -> int:
        """The same at all gateways. Raises Unavailable if one that may hold requests could not be asked."""
        num = self.here(wish)
        # Those that are not ready, too: a draining gateway finishes what it has.
        members = self._ctx.members.by_role(GATEWAY, ready=False)
        others = [member.actor_id for member in members if member.actor_id != self._ctx.address.actor_id]
        return num + sum(await asyncio.gather(*(self._ask(actor_id, wish) for actor_id in others)))

    async def _ask(self, actor_id: str, wish: AbortRequests) -> int:
        """The ask is idempotent, and made again while the same incarnation may have its requests."""
        why, epoch = "", None
        for _ in range(_TRIES):
            member = self._ctx.members.get(actor_id)
            if member is None or epoch not in (None, member.epoch):
                return 0
            epoch = member.epoch
            try:
                answer = (await self._ctx.ask(actor_id, wish, timeout_s=_ASK_S)).message
            except CallError as error:
                why = error.message
            else:
                if isinstance(answer, RequestsAborted):
                    return answer.num
                why = f"{actor_id} gave an answer that does not match"
            await asyncio.sleep(_PAUSE_S)
        message = f"Not every gateway could be told: {why}. Send it again: aborting what has ended does nothing."
        raise Unavailable(message, code="gateway_unreachable", retry_after_s=self._service.config.retry_after_s)
