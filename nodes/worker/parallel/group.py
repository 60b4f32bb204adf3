"""One worker's membership in its group of tensor-parallel ranks, over the mesh. `ranks.py` makes the decisions."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from kvstore.pool.device import CPU
from mesh.actor import Call, Context
from mesh.calls.persistent_ask import PersistentAsk
from mesh.membership.view import Member
from mesh.runtime.effects import Refuse, Reply
from nodes.protocol import GroupFormed, JoinGroup
from nodes.worker.config import WorkerConfig
from nodes.worker.parallel.collectives import Collectives, CollectivesMaker
from nodes.worker.parallel.ranks import Over, RankRendezvous, who_is_missing

JOIN_TIMEOUT_S: Final = 5.0
"""After this long a rank asks rank 0 again: answers can get lost, and rank 0 may be a new incarnation by then."""
FORM_TIMEOUT_S: Final = 120.0
"""The ranks have met before: sockets take milliseconds, NCCL on a device seconds. A start as a whole has no longer."""


def collectives_maker(config: WorkerConfig) -> CollectivesMaker:
    """The maker that connects the ranks of a worker with these settings; imports torch."""
    if config.device == CPU:
        from nodes.worker.parallel.shm_collectives import ShmCollectivesMaker

        return ShmCollectivesMaker(FORM_TIMEOUT_S)
    from nodes.worker.cuda.nccl_collectives import NcclCollectivesMaker

    return NcclCollectivesMaker(FORM_TIMEOUT_S)


class RankGroup:
    """See the module. `leave` ends this worker, for good; it is called at most once.

    `makers` makes what connects the ranks. It is called off the event loop, because it may import torch.
    """

    def __init__(
        self, config: WorkerConfig, leave: Callable[[str], None], makers: Callable[[WorkerConfig], CollectivesMaker]
    ) -> None:
        self._config = config
        self._leave = leave
        self._makers = makers
        self._maker: CollectivesMaker | None = None
        self._rendezvous: RankRendezvous | None = None
        self._met = asyncio.Event()
        self._formed: GroupFormed | None = None
        self._collectives: Collectives | None = None
        self._is_over = False

    @property
    def epoch(self) -> int:
        """The epoch of rank 0, which names the group; 0: there is no group yet."""
        return self._formed.epochs[0] if self._formed is not None else 0

    async def form(self, ctx: Context, persistent: PersistentAsk, own: JoinGroup, thread: Executor | None) -> None:
        """Meet the other ranks. Returns when all are there; the supervisor bounds how long that may take.

        `thread` is the one that will connect; None: nothing is to be connected. Raises CallError if rank 0 refuses for
        good, WorkerError or DeviceError if no unique id can be made.
        """
        if own.rank:
            formed = await persistent.ask(
                ctx, self._config.workers[0], own, timeout_s=JOIN_TIMEOUT_S, what="the other ranks"
            )
            self._formed = formed
            # The answer was meant for this actor's predecessor, which had asked under the same name.
            if formed.epochs[own.rank] != ctx.address.epoch:
                self._end(f"rank 0 has formed a group with another epoch of this rank, {formed.epochs[own.rank]}")
        else:
            unique_id = b""
            if thread is not None:
                # In the thread: importing torch may take a second, in which no heartbeat would be sent.
                unique_id = await asyncio.get_running_loop().run_in_executor(thread, self._unique_id)
            self._rendezvous = RankRendezvous(own, ctx.address.epoch, unique_id)
            ctx.log.info("waiting", what="the other ranks", size=own.size)
            await self._met.wait()
            self._formed = self._rendezvous.formed
        self.on_members(ctx, [])

    def connect(self) -> Collectives:
        """Connect the ranks, in the thread that will run the steps. Raises GroupNotFormed."""
        assert self._formed is not None, "the ranks have not met"
        config = self._config
        maker = self._maker or self._makers(config)
        collectives = maker.connect(self._formed.unique_id, config.tp_rank, config.tp_size, config.device)
        self._collectives = collectives
        # The group may have ended while the ranks connected, which no message can interrupt.
        if self._is_over:
            collectives.abort()
        return collectives

    def on_ask(self, call: Call) -> None:
        # Retryable: rank 0 can be asked before it has its rendezvous, and the other ranks must not end because of that.
        if self._rendezvous is None:
            call.fail("not_ready", "rank 0 is starting", retryable=True)
            return
        rank = call.message.rank
        if not 0 < rank < len(self._config.workers) or call.sender.actor_id != self._config.workers[rank]:
            call.fail("group_mismatch", f"{call.sender.actor_id} is not rank {rank} of {self._config.group}")
            return
        for command in self._rendezvous.join(call.message, call.sender.epoch, call):
            match command:
                case Reply(one, formed):
                    one.reply(formed)
                case Refuse(one, code, message, retryable):
                    one.fail(code, message, retryable=retryable)
                case Over(reason):
                    self._end(reason)
        if self._rendezvous.formed is not None:
            self._met.set()

    def on_members(self, ctx: Context, left: list[Member]) -> None:
        ids = self._config.workers
        if self._formed is not None:
            known = [member for one in ids if (member := ctx.members.get(one)) is not None]
            if reason := who_is_missing(ids, self._formed.epochs, [one.address for one in left], known):
                self._end(reason)
        elif self._rendezvous is not None:
            for member in left:
                if member.actor_id in ids:
                    self._rendezvous.lost(ids.index(member.actor_id), member.epoch)

    def abort(self) -> None:
        """Abort the collectives: no thread may hang in an operation with lost ranks, and the others should notice."""
        if self._collectives is not None:
            self._collectives.abort()

    def _unique_id(self) -> bytes:
        self._maker = self._makers(self._config)
        return self._maker.unique_id()

    def _end(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self.abort()
            self._leave(reason)
