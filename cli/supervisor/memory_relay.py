"""Passes requests about groups' memory from `meshctl` to the kv_agents with the pools; splits them, joins answers."""

import asyncio
from typing import Any, Final

import msgspec

from cli.plan.faults import unknown_name
from mesh.actor import Call, Context
from mesh.errors import CallError
from nodes.protocol.memory import GroupMemory, ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import KV_AGENT, KVAgentAttributes

MemoryRequest = ReleaseMemory | ResumeMemory | ListMemory

_ASK_TIMEOUT_S: Final = 2.0


async def relay(ctx: Context, call: Call, request: MemoryRequest, absent: str) -> None:
    """Ask every agent concerned, and answer `call` with all their answers, or with the first refusal.

    `absent` says which hosts cannot be asked; empty if all can.
    """
    agents = ctx.members.by_role(KV_AGENT)
    owners = {group: agent.actor_id for agent in agents for group in _groups_of(agent.attributes)}
    wanted = list(owners) if isinstance(request, ListMemory) else request.groups or list(owners)
    unknown = [group for group in wanted if group not in owners]
    if not owners:
        why = "; ".join(filter(None, ("no kv_agent is ready", absent, "try again in a moment")))
        call.fail("no_agent", why, retryable=True)
        return
    if unknown:
        fault = unknown_name(unknown[0], owners, "worker group")
        call.fail("unknown_group", "; ".join(filter(None, (fault.why, absent, fault.do))))
        return
    parts = {owner: [group for group in wanted if owners[group] == owner] for owner in owners.values()}
    asks = [_ask(ctx, owner, _part(request, groups)) for owner, groups in parts.items() if groups]
    try:
        answers = await asyncio.gather(*asks)
    except CallError as error:
        call.fail(error.code, error.message, retryable=error.retryable)
        return
    groups = [one for answer in answers for one in answer if one.group in wanted]
    call.reply(MemoryList(groups=sorted(groups, key=lambda one: one.group), note=absent))


def _groups_of(attributes: dict[str, Any]) -> list[str]:
    try:
        return msgspec.convert(attributes, KVAgentAttributes).groups
    except msgspec.ValidationError:
        # Someone else's agent with another idea of attributes.
        return []


def _part(request: MemoryRequest, groups: list[str]) -> MemoryRequest:
    return request if isinstance(request, ListMemory) else msgspec.structs.replace(request, groups=groups)


async def _ask(ctx: Context, agent: str, request: MemoryRequest) -> list[GroupMemory]:
    answer = (await ctx.ask(agent, request, timeout_s=_ASK_TIMEOUT_S)).message
    return answer.groups if isinstance(answer, MemoryList) else []
