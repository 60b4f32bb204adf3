"""Supervisor cores that are ready, and what is asked of their commands."""

from mesh.supervision.core import Supervisor
from mesh.supervision.events import Beat, Begin, MeshReady, Policy, Report, Spawned, Supervised

TWINS = (Supervised("a", kind="k"), Supervised("b", kind="k"))
"""Two that stand in for each other."""


def done(commands):
    """Commands without the reports."""
    return [command for command in commands if not isinstance(command, Report)]


def states(core):
    return {actor_id: watch.state for actor_id, watch in core.watches.items()}


def ready_mesh(*specs, policy=None, now=0.0):
    core = Supervisor(specs or [Supervised("a")], policy or Policy(), {})
    core.handle(Begin(), now)
    for actor_id in core.watches:
        core.handle(Spawned(actor_id, 1), now)
    for actor_id in core.watches:
        last = core.handle(Beat(actor_id, 1, ready=True), now)
    assert last[-1] == MeshReady()
    return core


def comes(core, actor_id, now):
    epoch = core.watches[actor_id].epoch
    core.handle(Spawned(actor_id, epoch), now)
    return done(core.handle(Beat(actor_id, epoch, ready=True), now))
