"""`GET /events/mesh`: tells open pages once a second how the mesh is, as server-sent events.

Pages are no calls: they are not counted as such, and a drain does not wait for them but tells them `bye`, upon which
they ask again. What is decided is in `core.py`, what is told in `shown.py`.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from mesh.actor import Context
from mesh.errors import CallError
from mesh.membership.view import Member
from nodes.gateway.calls.call import ClientLeft
from nodes.gateway.errors import Unavailable
from nodes.gateway.http.authorization import Authorization
from nodes.gateway.http.call import HttpCall
from nodes.gateway.page.core import MAX_PAGES, FeedCore
from nodes.gateway.page.shown import SampleShown, call_shown, death_shown, mesh_shown, samples_shown
from nodes.gateway.service import GatewayService
from nodes.protocol.records import CallsFound, FindCalls
from nodes.roles import GATEWAY
from nodes.stats import ActorStats, ask_stats

BYE: Final = b"event: bye\ndata: {}\n\n"
_BYE_S: Final = 1.0
"""A page that reads takes it within a round trip; one that does not must not hold up a drain."""
_FIRST_CALLS: Final = 50
"""Of each gateway, when the first page is opened."""
_FIRST_DEATHS_S: Final = 86_400.0
"""A gateway remembers 64 deaths; those of another day are told by its log."""
_DEATHS_S: Final = 10.0
"""Several rounds, of which some may fail; a death that is told twice is known by its epoch."""


class MeshFeed:
    """The open pages of one gateway, and the asks made for all of them together."""

    def __init__(self, ctx: Context, service: GatewayService, keys: Authorization | None) -> None:
        self._ctx = ctx
        self._service = service
        self._keys = keys
        self._core = FeedCore()
        self._news: dict[int, asyncio.Event] = {}
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: dict[str, int] = {}

    @property
    def num_pages(self) -> int:
        return self._core.num_pages

    def end(self) -> None:
        """Tell all pages `bye`, and take no more of them. Calling this again is harmless."""
        if not self._over.done():
            self._over.set_result(None)
            self._wake()

    async def __call__(self, call: HttpCall) -> None:
        retry_after_s = self._service.config.retry_after_s
        if self._over.done():
            raise Unavailable("This gateway is draining.", code="draining", retry_after_s=retry_after_s)
        page = self._core.open()
        if page is None:
            message = f"{MAX_PAGES} pages read this gateway's events, its maximum. Close one, or read /metrics."
            raise Unavailable(message, code="too_many_pages", retry_after_s=retry_after_s)
        news = self._news[page] = asyncio.Event()
        # There is something already if other pages are open.
        news.set()
        self._arm()
        try:
            await call.start_stream()
            await self._tell(call, page, news)
        finally:
            # Whatever ended it: a page that is counted for ever would in the end be the 64th.
            del self._news[page]
            self._core.close(page)

    async def _tell(self, call: HttpCall, page: int, news: asyncio.Event) -> None:
        while not self._over.done():
            await self._unless(call.gone, news.wait())
            news.clear()
            if self._keys is not None:
                # Whose key was revoked reads on for no more than a second.
                self._keys.key_of(call.headers)
            if (data := self._core.take(page)) is not None:
                await self._write(call, b"data: " + data + b"\n\n")
        try:
            async with asyncio.timeout(_BYE_S):
                await call.write(BYE, more=False)
        except TimeoutError:
            await _cut(call)

    async def _write(self, call: HttpCall, data: bytes) -> None:
        writing = asyncio.ensure_future(call.write(data))
        try:
            await asyncio.wait((writing, call.gone, self._over), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            elif call.gone.done():
                raise ClientLeft
            else:
                await _cut(call)
        finally:
            writing.cancel()

    @staticmethod
    async def _unless(gone: asyncio.Future[None], waits: Coroutine[Any, Any, Any]) -> None:
        waiting = asyncio.ensure_future(waits)
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if gone.done():
            raise ClientLeft

    def _wake(self) -> None:
        for news in self._news.values():
            news.set()

    def _arm(self) -> None:
        due_s = self._core.due(self._ctx.now())
        if due_s is not None and not self._over.done():
            self._ctx.later(due_s, self._begin)

    def _begin(self) -> None:
        # Several timers may have been set, by pages that were opened one after the other; the first one begins.
        if self._core.due(self._ctx.now()) == 0.0 and not self._over.done():
            self._core.begin(self._ctx.now())
            self._ctx.spawn(self._round(), name="mesh_feed")

    async def _round(self) -> None:
        try:
            await self._gather()
        finally:
            self._core.end()
            self._wake()
            self._arm()

    async def _gather(self) -> None:
        members, timeout_s = self._ctx.members.all(), self._service.config.scrape_timeout_s
        if not self._core.numbers:
            # Nobody has read for a while: what was read then is forgotten.
            self._ended = {}
        stats, found = await asyncio.gather(
            ask_stats(self._ctx, members, timeout_s, self._core.numbers), self._ask_gateways(members, timeout_s)
        )
        now, me = time.time(), self._ctx.address.actor_id
        state = mesh_shown(self._service.config, me, now, members, stats, self._service.missing_roles())
        samples = {member.address: _samples(one, now) for member, one in zip(members, stats, strict=True)}
        calls = [call_shown(call) for answer in found for call in answer.calls]
        self._core.gathered(state, samples, calls, [death_shown(one, now) for answer in found for one in answer.deaths])

    async def _ask_gateways(self, members: list[Member], timeout_s: float) -> list[CallsFound]:
        query = FindCalls(last=_FIRST_CALLS, deaths_s=_FIRST_DEATHS_S)
        # With what each gateway said it had ended, so that a call is told once, whichever round fails.
        if self._ended:
            query = FindCalls(follows=True, after=self._ended, deaths_s=_DEATHS_S)
        gateways = [member.actor_id for member in members if member.role == GATEWAY]
        answers = await asyncio.gather(*(self._ask_gateway(one, query, timeout_s) for one in gateways))
        for answer in answers:
            self._ended |= answer.ended
        return answers

    async def _ask_gateway(self, gateway: str, query: FindCalls, timeout_s: float) -> CallsFound:
        if gateway == self._ctx.address.actor_id:
            return self._service.find_calls(query)
        try:
            answer = (await self._ctx.ask(gateway, query, timeout_s=timeout_s)).message
        except CallError:
            return CallsFound(calls=[])
        return answer if isinstance(answer, CallsFound) else CallsFound(calls=[])


def _samples(answer: ActorStats, now: float) -> list[SampleShown]:
    history = None if answer.stats is None else answer.stats.history
    return [] if history is None else samples_shown(answer.actor_id, answer.epoch, history, now)


async def _cut(call: HttpCall) -> None:
    """End the connection of a page that does not read. Raises ClientLeft."""
    call.cut()
    await asyncio.wait((call.gone,), timeout=_BYE_S)
    raise ClientLeft
