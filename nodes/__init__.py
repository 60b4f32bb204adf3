"""The roles of a mesh, and `Engine`, a mesh for programs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodes.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # When it is asked for: actors, which import roles, would pay for it.
    if name == "Engine":
        return import_module("nodes.engine.engine").Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
