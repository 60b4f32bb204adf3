"""The interface of an actor: `Actor` to subclass, `Context` to act through, `Call` to answer.

Every role is one `Actor` class whose handlers translate between frames and a pure core. The same class runs on ZeroMQ
and in the simulation. What can be overridden is in `mesh/handlers.py`.
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from mesh.address import Address
from mesh.calls.asking import Answer
from mesh.calls.serving import Call
from mesh.context import Context
from mesh.handlers import Handlers
from mesh.transport.base import Buffer

__all__ = ["Actor", "Answer", "Call", "Context"]


class Actor(Handlers):
    """Base class of all actors: the handlers, which subclasses override as needed, and a context to act through."""

    ctx: Context

    @override
    def on_tell(self, sender: Address, message: Any, buffers: Sequence[Buffer]) -> None:
        self.ctx.metrics.count("mesh_unhandled_total", type=type(message).__name__)
