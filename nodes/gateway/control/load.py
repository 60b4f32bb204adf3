"""How much a mesh has to do, as its gateways and schedulers say when they are asked."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from mesh.actor import Context
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import Unavailable
from nodes.roles import GATEWAY, SCHEDULER
from nodes.stats import ActorStats, ask_stats

_RUNNING, _WAITING = "mesh_gateway_requests_running", "mesh_gateway_requests_waiting"
_TOKENS: Final = "mesh_scheduler_load_tokens"


class Load(NamedTuple):
    """Requests that gateways hold: those that a scheduler has, and those that wait for one or for their prompt.

    `num_tokens`: of requests that schedulers hold, in pages or waiting; one that is handed from prefill to decode is
    counted at both, as both have work with it. `silent` are the gateways that did not say.
    """

    num_running: int
    num_waiting: int
    num_tokens: int
    silent: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting


async def load_of_mesh(ctx: Context, config: GatewayConfig) -> Load:
    """Within `scrape_timeout_s`, whoever is silent."""
    gateways = {member.actor_id: member for member in ctx.members.by_role(GATEWAY, ready=False)}
    # It is among the members only once the registry has said so.
    gateways[ctx.address.actor_id] = ctx.describe()
    # One that has died, or starts, has nothing to do.
    schedulers = ctx.members.by_role(SCHEDULER)
    answers = await ask_stats(ctx, [*gateways.values(), *schedulers], config.scrape_timeout_s)
    return Load(
        _sum(answers, _RUNNING),
        _sum(answers, _WAITING),
        _sum(answers, _TOKENS),
        tuple(answer.actor_id for answer in answers if answer.role == GATEWAY and answer.stats is None),
    )


async def whole_load(ctx: Context, config: GatewayConfig) -> Load:
    """For who acts on "nothing is under way". Raises Unavailable if a gateway does not say."""
    load = await load_of_mesh(ctx, config)
    if load.silent:
        message = f"The load is not known: {', '.join(load.silent)} does not say whether it has requests. Ask again."
        raise Unavailable(message, code="load_unknown", retry_after_s=config.retry_after_s)
    return load


def _sum(answers: Iterable[ActorStats], gauge: str) -> int:
    return int(sum(answer.stats.gauges.get(gauge, 0.0) for answer in answers if answer.stats is not None))
