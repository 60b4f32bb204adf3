"""Whether the mesh serves, as its gateway on this host says, and who has not come to a mesh of several hosts."""

import asyncio
import contextlib
from typing import Final

import msgspec

from cli.plan.names import supervisor_id
from cli.plan.settings import Settings
from mesh.membership.view import Membership

_ASK_S: Final = 1.0
_MAX_ANSWER_BYTES: Final = 64 << 10


class _Answer(msgspec.Struct):
    reasons: list[str] = []


async def unready_reason(host: str, port: int) -> str:
    """What the gateway's readiness route lacks, by one HTTP request; empty where it says that requests are served."""
    # Addresses to listen at; nothing can be reached at them.
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(_ASK_S):
            reader, writer = await asyncio.open_connection(target, port)
            try:
                writer.write(f"GET /health/ready HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.read(_MAX_ANSWER_BYTES)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
        return "the gateway does not answer"
    if head.split()[1:2] == [b"200"]:
        return ""
    try:
        return "; ".join(msgspec.json.decode(body, type=_Answer).reasons) or "the gateway is not ready"
    except msgspec.DecodeError:
        return "the gateway is not ready"


def absent_hosts(settings: Settings, members: Membership) -> str:
    """Hosts of the topology whose supervisors are no members, in words; empty where all are, or there is one."""
    absent = [name for name in settings.hosts if name != settings.on and members.get(supervisor_id(name)) is None]
    if not absent:
        return ""
    return f"host{'s' * (len(absent) > 1)} {', '.join(absent)} {'are' if len(absent) > 1 else 'is'} not in the mesh"
