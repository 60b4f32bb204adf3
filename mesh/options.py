"""Settings of one actor's system: every limit of `mesh/` that a deployment may want to change."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from mesh.address import Address, Endpoint
from mesh.membership.proof import HostSecret
from mesh.membership.view import Member
from mesh.runtime.plain_structlog import structlog
from mesh.runtime.process_usage import ProcessUsage
from mesh.runtime.trace_ring import TraceRing
from mesh.wire.header import Limits

MAX_PEERS: Final = 4096
"""As many peers as a transport has sockets for, and a process descriptors where their limit can be raised to 65,536."""


@dataclass(frozen=True)
class SystemOptions:
    """What an `ActorSystem` is made with, beside actor, address, transport and bootstrap.

    `mesh` is the name of the mesh to join, if that is to be checked, and `spec` what this host takes it to be.
    `supervisor` is where heartbeats go besides the registry. `usage` reports the process's resource usage, if the actor
    has a process of its own. `random` draws trace ids and jitter; pass a seeded one if runs have to repeat.
    `secret` is the supervisor's, with which this actor proves its identity and checks others; without it, it checks no
    proofs, and shows the `proof` that it was given, if any. `vet_host` raises `FrameRefused` for a member of another
    host that its key does not allow, where links between hosts have keys. `log` is where it logs, if that is not the
    log of the whole process: in a program of somebody else's. `trace` is where it notes what it does, if that is to
    outlive it.
    """

    mesh: str = ""
    spec: dict[str, str] = field(default_factory=dict[str, str])
    host: str = ""
    pid: int = 0
    supervisor: tuple[Address, Endpoint] | None = None
    usage: Callable[[], ProcessUsage] | None = None
    secret: HostSecret | None = None
    proof: bytes = b""
    vet_host: Callable[[Member], None] | None = None
    log: structlog.stdlib.BoundLogger | None = None
    trace: TraceRing | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    limits: Limits = field(default_factory=Limits)
    heartbeat_s: float = 0.5
    hello_timeout_s: float = 2.0
    join_timeout_s: float = 2.0
    retry_min_s: float = 0.05
    retry_max_s: float = 2.0
    renew_subscription_s: float = 2.0
    max_pending_calls: int = 8192
    mailbox_capacity: int = 4096
    max_peers: int = MAX_PEERS
    replay_capacity: int = 4096
    random: Random = field(default_factory=Random)

    def log_of(self, address: Address) -> structlog.stdlib.BoundLogger:
        names = {"actor": address.actor_id, "epoch": address.epoch}
        return structlog.get_logger(**names) if self.log is None else self.log.bind(**names)
