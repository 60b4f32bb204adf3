"""Which requests wait for a scheduler that was lost, and for how long. Pure; called by the core.

what was lost          who says so                                then
the link alone         the scheduler itself, when it is asked     back to it at once: what it computed is there
the scheduler          its host's supervisor                      its next incarnation is waited for, which finds it
the host               nobody                                     elsewhere after `WORD_OF_DEATH_S`
"""

from mesh.address import host_of
from nodes.gateway.config import GatewayConfig
from nodes.gateway.events import SchedulerAnswered
from nodes.gateway.peers import Peers
from nodes.gateway.requests import Phase, RequestState
from nodes.gateway.retrying import WORD_OF_DEATH_S


def wait(state: RequestState, lost_epoch: int, gateway: str, config: GatewayConfig, now: float) -> None:
    """The KV of a request that has output is at the scheduler that is lost: anywhere else it is computed again."""
    state.phase = Phase.WAITING
    state.awaited_epoch = lost_epoch + 1
    state.return_by = state.retry_at = now + config.reconnect_grace_s
    # Who dies on the gateway's own host did not die with that.
    if host_of(state.scheduler) != host_of(gateway):
        state.retry_at = min(state.return_by, now + WORD_OF_DEATH_S)


def is_back(state: RequestState, peers: Peers) -> bool:
    """Whether the next incarnation is ready. If it is said that there will be one, `state` waits longer."""
    epoch = peers.epoch_of(state.scheduler)
    if not epoch:
        state.retry_at = state.return_by
    return epoch >= state.awaited_epoch


def is_there(state: RequestState, event: SchedulerAnswered) -> bool:
    """Whether the incarnation that was lost answers. Not twice without output in between: then the way is to blame."""
    is_awaited = state.awaited_epoch == event.epoch + 1 and state.scheduler == event.scheduler
    return is_awaited and state.has_progressed
