"""Ids of the actors that every host has one of. Pure.

On a mesh of several hosts ids end in `.HOST`, so that no two hosts have actors of the same id; otherwise they do not.
"""

from mesh.membership.view import SUPERVISOR


def on_host(name: str, host: str) -> str:
    """The id, or the name of a group, on a host; `host` is "" on a mesh of one."""
    return f"{name}.{host}" if host else name


def supervisor_id(host: str) -> str:
    """The id of a host's supervisor."""
    return on_host(SUPERVISOR, host)


def agent_id(host: str) -> str:
    """The id of a host's kv_agent."""
    return on_host("kv-agent-0", host)
