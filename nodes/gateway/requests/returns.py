"""Which requests wait for a scheduler that was lost, and for how long. Pure; called by the core.

what was lost     who says so                          then the request
the link alone    the scheduler itself, when asked     goes back to it at once: what it computed is there
the scheduler     its host's supervisor                waits for its next incarnation, which finds the KV
the host          nobody                               goes elsewhere after `WORD_OF_DEATH_S`
"""

from mesh.address import host_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.requests.events import SchedulerAnswered
from nodes.gateway.requests.log import Phase, RequestState
from nodes.gateway.requests.peers import Peers
from nodes.gateway.requests.retrying import WORD_OF_DEATH_S


def wait(state: RequestState, lost_epoch: int, gateway: str, config: GatewayConfig, now: float) -> None:
    """Wait for the lost scheduler, which has the request's KV: anywhere else it would have to be computed again."""
    state.phase = Phase.WAITING
    state.awaited_epoch = lost_epoch + 1
    state.return_by = state.retry_at = now + config.reconnect_grace_s
    # A scheduler on the gateway's own host was not lost together with its host.
    if host_of(state.scheduler) != host_of(gateway):
        state.retry_at = min(state.return_by, now + WORD_OF_DEATH_S)


def is_back(state: RequestState, peers: Peers) -> bool:
    """Whether the next incarnation is ready. Once the lost one is reported dead, `state` waits longer for the next."""
    epoch = peers.epoch_of(state.scheduler)
    if not epoch:
        state.retry_at = state.return_by
    return epoch >= state.awaited_epoch


def is_there(state: RequestState, event: SchedulerAnswered) -> bool:
    """Whether the lost incarnation answered. Not twice without output in between: then the link is to blame."""
    is_awaited = state.awaited_epoch == event.epoch + 1 and state.scheduler == event.scheduler
    return is_awaited and state.has_progressed
