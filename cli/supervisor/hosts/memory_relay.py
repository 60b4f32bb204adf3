"""Passes requests about groups' memory from `meshctl` to the kv_agents with the pools; splits them, joins answers."""

import asyncio
from typing import Any

import msgspec

from cli.plan.faults import unknown_name
from cli.supervisor.hosts.whole_mesh import ask
from cli.supervisor.told.refusals import NoAgent, UnknownGroup
from mesh.actor import Context
from nodes.protocol.memory import ListMemory, MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import KV_AGENT, KVAgentAttributes

MemoryRequest = ReleaseMemory | ResumeMemory | ListMemory


async def relay(ctx: Context, request: MemoryRequest, absent: str) -> MemoryList:
    """Ask every agent concerned, and join their answers. Raises Refused, or the CallError of the first that fails.

    `absent` says which hosts cannot be asked; empty if all can.
    """
    agents = ctx.members.by_role(KV_AGENT)
    owners = {group: agent.actor_id for agent in agents for group in _groups_of(agent.attributes)}
    wanted = list(owners) if isinstance(request, ListMemory) else request.groups or list(owners)
    unknown = [group for group in wanted if group not in owners]
    if not owners:
        raise NoAgent("; ".join(filter(None, ("no kv_agent is ready", absent, "try again in a moment"))))
    if unknown:
        fault = unknown_name(unknown[0], owners, "worker group")
        raise UnknownGroup("; ".join(filter(None, (fault.why, absent, fault.do))))
    parts = {owner: [group for group in wanted if owners[group] == owner] for owner in owners.values()}
    asks = [ask(ctx, owner, _part(request, groups), MemoryList) for owner, groups in parts.items() if groups]
    groups = [group for answer in await asyncio.gather(*asks) for group in answer.groups if group.group in wanted]
    return MemoryList(groups=sorted(groups, key=lambda group: group.group), note=absent)


def _groups_of(attributes: dict[str, Any]) -> list[str]:
    try:
        return msgspec.convert(attributes, KVAgentAttributes).groups
    except msgspec.ValidationError:
        # Someone else's agent with another idea of attributes.
        return []


def _part(request: MemoryRequest, groups: list[str]) -> MemoryRequest:
    return request if isinstance(request, ListMemory) else msgspec.structs.replace(request, groups=groups)
