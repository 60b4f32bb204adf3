"""Releases the memory of all worker groups, and has them take it again, by SGLang's tags.

    POST /release_memory_occupation --> a gateway --ReleaseMemory--> its host's supervisor --> kv_agents of all hosts

Groups take weights and KV together. So `weights` asked for alone, while KV is released as well, is taken with
`kv_cache`, without which nobody could use them; trainers ask for both in this order.
"""

import asyncio
from collections.abc import Collection
from typing import Final

from mesh.actor import Context
from mesh.address import host_of
from mesh.errors import CallError, RemoteError, Unreachable
from mesh.membership.view import READY, SUPERVISOR
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import ApiError, BadRequest, Conflict, TimedOut, Unavailable
from nodes.memory_waiter import LOOK_INTERVAL_S, MemoryRequest, MemoryWaiter, WishUndone
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import KV_AGENT, SCHEDULER, WORKER

KV_CACHE: Final = "kv_cache"
WEIGHTS: Final = "weights"
TAGS: Final = (KV_CACHE, WEIGHTS, "cuda_graph")
"""Those of SGLang. There are no graphs here that take memory of their own."""
_ASK_S: Final = 5.0
"""The supervisor gives agents 2 s."""


def wish_to_release(tags: Collection[str]) -> ReleaseMemory | None:
    """None if nothing is to be released."""
    kept = {KV_CACHE, WEIGHTS}.difference(tags or TAGS)
    return None if len(kept) == 2 else ReleaseMemory(keep_weights=WEIGHTS in kept, keep_kv=KV_CACHE in kept)


def groups_to_resume(tags: Collection[str], groups: Collection[GroupMemory]) -> list[str]:
    """Those that can use what they are to take: with `weights` alone, those that have kept their KV."""
    released = [group for group in groups if group.state != "held"]
    if KV_CACHE in (tags or TAGS):
        return [group.group for group in released]
    return [group.group for group in released if WEIGHTS in tags and group.pool_bytes]


def is_empty(group: GroupMemory) -> bool:
    """Whether it has nothing cached, being without memory for it."""
    return group.state == "released" and not group.pool_bytes


class MemoryControl:
    """What one gateway has its supervisor do."""

    def __init__(self, ctx: Context, config: GatewayConfig, stopping: asyncio.Future[None]) -> None:
        self._ctx = ctx
        self._config = config
        self._stopping = stopping

    async def release(self, tags: Collection[str]) -> MemoryList:
        """All groups, once what `tags` name is released; empty: everything. Raises ApiError."""
        if (wish := wish_to_release(tags)) is None:
            return await self._list()
        return await self._until(wish, "released")

    async def resume(self, tags: Collection[str]) -> MemoryList:
        """All groups, once they serve with what `tags` name; empty: everything. Raises ApiError."""
        found = await self._list()
        if names := groups_to_resume(tags, found.groups):
            await self._until(ResumeMemory(groups=names), "held")
            await self._until_ready(names)
            found = await self._list()
        return found

    async def groups_without_kv(self) -> list[str]:
        """Groups of which nothing is cached anywhere. Raises ApiError."""
        return [group.group for group in (await self._list()).groups if is_empty(group)]

    async def _list(self) -> MemoryList:
        try:
            return await self._ask(ListMemory())
        except CallError as error:
            raise self._refused(error) from error

    async def _until(self, wish: MemoryRequest, state: str) -> MemoryList:
        waiter, agents = MemoryWaiter(wish, state), self._agents()
        told = note = ""
        try:
            async with asyncio.timeout(self._config.memory_timeout_s):
                while not waiter.is_done:
                    if not isinstance(waiter.question, ListMemory):
                        # As of when the wish goes out: one that ends after that has forgotten it, and is asked again.
                        agents = self._agents()
                    try:
                        answer = await self._ask(waiter.question)
                    except CallError as error:
                        if not error.retryable:
                            raise self._refused(error) from error
                        told = error.message
                    else:
                        waiter.answered(answer.groups, lambda before=agents: self._agents() != before)
                        told, note = waiter.told, answer.note
                    if not waiter.is_done:
                        await self._pause()
        except TimeoutError:
            raise self._late(f"not {state}", told) from None
        except WishUndone as undone:
            raise Conflict(f"The memory changed hands: {undone}.") from undone
        return MemoryList(groups=waiter.groups, note=note)

    async def _until_ready(self, groups: Collection[str]) -> None:
        wanted = [f"{role}-{group}" for role in (SCHEDULER, WORKER) for group in groups]
        late: list[str] = []
        try:
            async with asyncio.timeout(self._config.memory_timeout_s):
                while late := [one for one in wanted if not self._is_ready(one)]:
                    await self._pause()
        except TimeoutError:
            raise self._late("has its memory but does not serve", ", ".join(late)) from None

    def _is_ready(self, actor_id: str) -> bool:
        member = self._ctx.members.get(actor_id)
        return member is not None and member.state == READY

    def _agents(self) -> dict[str, int]:
        return {agent.actor_id: agent.epoch for agent in self._ctx.members.by_role(KV_AGENT, ready=False)}

    async def _ask(self, question: MemoryRequest | ListMemory) -> MemoryList:
        """Raises CallError."""
        host = host_of(self._ctx.address.actor_id)
        supervisors = self._ctx.members.by_role(SUPERVISOR, ready=False)
        own = next((one.actor_id for one in supervisors if host_of(one.actor_id) == host), None)
        if own is None:
            raise Unreachable("the supervisor of this gateway's host is not in the mesh")
        answer = (await self._ctx.ask(own, question, timeout_s=_ASK_S)).message
        if not isinstance(answer, MemoryList):
            raise RemoteError("bad_answer", f"{own} gave an answer that does not match")
        return answer

    async def _pause(self) -> None:
        done, _ = await asyncio.wait([self._stopping], timeout=LOOK_INTERVAL_S)
        if done:
            raise Unavailable("This gateway is shutting down; what was asked for goes on.", code="shutting_down")

    def _refused(self, error: CallError) -> ApiError:
        if error.retryable:
            retry_after_s = self._config.retry_after_s
            return Unavailable(f"{error.message}.", code=error.code, retry_after_s=retry_after_s)
        kind = Conflict if error.code == "already_released" else BadRequest
        return kind(f"{error.message}.", code=error.code)

    def _late(self, what: str, told: str) -> TimedOut:
        within = f"within {self._config.memory_timeout_s:g} s"
        return TimedOut(f"Memory {what} {within}: {told}. Ask again: it goes on from there.", code="memory_timeout")
