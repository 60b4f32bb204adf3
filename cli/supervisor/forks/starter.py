"""Starts the processes of actors: as forks of the zygote, or as interpreters of their own."""

import asyncio
from typing import Final

import msgspec

from cli.plan.topology import ActorLaunch, Topology
from cli.supervisor.forks.role import RoleRun
from cli.supervisor.forks.zygote_client import OnFailed, OnForked, ZygoteClient
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.processes.children import Children, actor_environment, spawn_process
from cli.supervisor.processes.exits import Exits
from cli.supervisor.told.record import ZYGOTE, SupervisionRecord
from mesh.membership.proof import HostSecret
from mesh.runtime.supervisor_line import SupervisorEnd

_LINE_FD: Final = 3
"""Where an actor that is not forked finds its line."""


class ActorStarter:
    """Each process gets a line to its supervisor, by which it is told what to be, and `secret`.

    Callbacks come later on the loop, one of the two for each start.
    """

    def __init__(
        self,
        topology: Topology,
        directory: MeshDirectory,
        children: Children,
        exits: Exits,
        record: SupervisionRecord,
        secret: HostSecret,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._directory = directory
        self._secret = secret
        self._forks = topology.forks
        supervision = topology.settings.supervision
        self._drain_timeout_s = supervision.drain_timeout_s
        self._environment = actor_environment(topology.num_threads)
        self._zygote = ZygoteClient(
            children,
            exits,
            topology.preloads,
            on_death=record.zygote_death,
            log=directory.log(ZYGOTE),
            environment=self._environment,
            timeout_s=supervision.start_timeout_s,
        )

    def warm(self) -> None:
        """Start the zygote, which takes longer than any actor, if the mesh needs one."""
        if self._forks:
            self._zygote.start()

    def start(
        self, launch: ActorLaunch, epoch: int, line: SupervisorEnd, on_started: OnForked, on_failed: OnFailed
    ) -> None:
        order = RoleRun(
            mesh=self._directory.mesh,
            role=launch.role,
            actor_id=launch.actor_id,
            epoch=epoch,
            config=launch.supervised_config,
            drain_timeout_s=self._drain_timeout_s,
            secret=self._secret,
        )
        log, theirs = self._directory.log(launch.actor_id), line.theirs.fileno()
        try:
            line.give_order(msgspec.msgpack.encode(order))
            if launch.start == "fork":
                self._zygote.fork(log, theirs, on_started, on_failed)
                return
            arguments = ["-m", "cli.supervisor.forks.role", str(_LINE_FD), launch.actor_id]
            process = spawn_process(arguments, log, {_LINE_FD: theirs}, self._environment)
        except OSError as error:
            # Not at once: the commands that the core's last event led to are still being performed.
            self._loop.call_soon(on_failed, str(error), False)
        else:
            self._loop.call_soon(on_started, process)

    def close(self) -> None:
        self._zygote.close()
