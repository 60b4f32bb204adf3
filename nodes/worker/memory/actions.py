"""Performs what `core.py` decides: releases a worker's memory and takes it back.

Part of the worker's actor, which owns runner and pool and offers them as a `Resident`. A failure here ends the process:
that frees its memory whatever the reason was, and the next incarnation begins with what it is given.
"""

import contextlib
import ctypes
import gc
from typing import Protocol

from kvstore.protocol import PoolHandle
from mesh.actor import Call, Context
from mesh.membership.view import READY, RELEASED
from mesh.runtime.driver import CoreDriver, perform
from mesh.runtime.effects import Asked
from nodes.protocol.memory import LetGo, TakeUp
from nodes.worker.memory.core import (
    Command,
    Event,
    GoOn,
    HasReleased,
    HasResumed,
    MemoryOccupation,
    Release,
    Resume,
    StepsEnded,
    StopSteps,
)


class Resident(Protocol):
    """The worker's actor, as far as changes of its memory concern it."""

    ctx: Context

    def stop_steps(self, *, is_stopped: bool) -> bool:
        """Begin no more steps, or begin them again. Returns whether one runs."""
        ...

    async def release_memory(self, weights: str) -> None:
        """Release the pool, and do with the weights as `weights` says (`keep`, `backup`, `reload`). No step runs."""
        ...

    async def take_memory(self, handle: PoolHandle) -> None:
        """Map the pool, and restore weights and runner."""
        ...


class MemoryActions:
    """Performs the commands of its core for one worker; errors end the process."""

    def __init__(self, owner: Resident) -> None:
        self._owner = owner
        self._core = MemoryOccupation()
        self._driver = CoreDriver[Event, Command](
            owner, "memory", lambda event, _: self._core.handle(event), self._perform
        )

    @property
    def is_held(self) -> bool:
        return self._core.is_held

    def on_order(self, call: Call, order: LetGo | TakeUp) -> None:
        """The agent orders memory to be released or taken back."""
        self._driver.feed(Asked(call.sender, order, call))

    def steps_ended(self) -> None:
        self._driver.feed(StepsEnded())

    def _perform(self, command: Command) -> None:
        match command:
            case StopSteps():
                if not self._owner.stop_steps(is_stopped=True):
                    self._driver.feed(StepsEnded())
            case GoOn():
                self._owner.stop_steps(is_stopped=False)
            case Release(weights):
                self._owner.ctx.spawn(self._release(weights), name="release")
            case Resume(pool):
                self._owner.ctx.spawn(self._resume(pool), name="resume")
            case _:
                perform(command, self._owner.ctx)

    async def _release(self, weights: str) -> None:
        ctx = self._owner.ctx
        try:
            await self._owner.release_memory(weights)
        except Exception as error:  # noqa: BLE001 # whatever it is, the end of the process frees everything
            ctx.fail(f"the worker's memory cannot be released in place: {type(error).__name__}: {error}")
            return
        ctx.announce(RELEASED)
        ctx.log.info("memory released", weights=weights)
        self._driver.feed(HasReleased())

    async def _resume(self, handle: PoolHandle) -> None:
        ctx = self._owner.ctx
        try:
            await self._owner.take_memory(handle)
        except Exception as error:  # noqa: BLE001 # the next incarnation loads everything anew, or says why not
            ctx.fail(f"the worker's memory cannot be taken back in place: {type(error).__name__}: {error}")
            return
        ctx.announce(READY)
        ctx.log.info("memory taken up")
        self._driver.feed(HasResumed())


def give_back_heap() -> None:
    """Collect what a dropped model leaves, and give the C heap's free pages to the system."""
    # The collector must look again at what was frozen after the model was loaded.
    gc.unfreeze()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
