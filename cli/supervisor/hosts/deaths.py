"""How a supervisor's message that an incarnation is dead goes round the mesh.

    supervisor of its host --ipc--> actors of that host
                           --PeerDown, over the network--> supervisor of each other host --said_by, ipc--> its actors
                           --Leave--> registry, which tells everybody too

So a death costs one message per host, on links that stay, instead of three per actor of the mesh, most of which have
never spoken to this supervisor. Actors of a host without a supervisor, or whose supervisor's queue is full, are told
directly. If a supervisor dies before it has passed the message on, its actors learn of the death from the registry, or
without a registry from the connection that ended.
"""

import msgspec

from cli.supervisor.hosts.whole_mesh import home_of, is_own, other_supervisors
from mesh.actor import Context
from mesh.address import Address, host_of
from mesh.errors import CallError
from mesh.transport.base import Channel
from mesh.wire.frames import Leave, PeerDown

_LEAVE_TIMEOUT_S = 1.0
"""Less than the lease (5 s), by which the member is gone anyway."""


def tell_death(ctx: Context, dead: Address, reason: str) -> None:
    """Tell everybody that an actor of this supervisor's is dead."""
    down = PeerDown(actor_id=dead.actor_id, epoch=dead.epoch, reason=reason)
    # In its own view as well, which would otherwise bring the dead actor back to life at the next registry.
    ctx.bury(dead, reason)
    _tell_own(ctx, down)
    # On a mesh of one host all actors are its own, whatever they call the machine.
    if own := host_of(ctx.address.actor_id):
        heard = {host_of(peer.actor_id) for peer in other_supervisors(ctx) if _tell(ctx, peer.actor_id, down)}
        for member in ctx.members.all():
            if (host := home_of(member)) != own and host not in heard:
                _tell(ctx, member.actor_id, down)
    ctx.spawn(_leave(ctx, dead, reason), name=f"leave-{dead}")


def pass_on_death(ctx: Context, sender: Address, down: PeerDown) -> None:
    """Tell only this host's actors what another's supervisor says of its own; supervisors would not believe it."""
    _tell_own(ctx, msgspec.structs.replace(down, said_by=sender.actor_id))


def _tell_own(ctx: Context, down: PeerDown) -> None:
    for member in ctx.members.all():
        if is_own(ctx, member) and member.actor_id not in (down.actor_id, ctx.address.actor_id):
            _tell(ctx, member.actor_id, down)


def _tell(ctx: Context, actor_id: str, down: PeerDown) -> bool:
    return ctx.tell(actor_id, down, channel=Channel.CONTROL)


async def _leave(ctx: Context, dead: Address, reason: str) -> None:
    leave = Leave(actor_id=dead.actor_id, epoch=dead.epoch, reason=reason)
    for registry in ctx.members.by_role("registry", ready=False):
        try:
            await ctx.ask(registry.actor_id, leave, timeout_s=_LEAVE_TIMEOUT_S)
        except CallError:
            # Its lease ends by itself.
            return
