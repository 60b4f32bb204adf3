"""What all hosts of a mesh must have in common, and what a host without a topology file takes over from it. Pure.

The registry is configured with both (`cli/plan/topology.py`); `mesh/membership/spec.py` compares hosts.
"""

from typing import Any, Final

import msgspec

from cli.plan.settings import Settings
from nodes.context_length import ServedContext
from nodes.models.spec import ModelSpec

_SHARED: Final = (
    "dtype", "quantize", "pooling", "served_name", "deterministic", "host", "port", "tp", "prefill_tp", "decode_tp",
    "context_length", "max_running", "chunk", "max_step_ms", "local_prefill_max", "external", "roles", "registry_port",
)  # fmt: skip


def host_spec(settings: Settings, spec: ModelSpec, context: ServedContext, release: str) -> dict[str, str]:
    """What this host takes the mesh to be, as text by name. The dtype of `settings` must be filled in."""
    return {
        "mesh": settings.name,
        "release": release,
        "model": f"{spec.name} ({spec.fingerprint[-12:]})" if spec.fingerprint != spec.name else spec.name,
        "dtype": settings.dtype,
        "quantize": settings.quantize,
        "pooling": settings.pooling,
        "page_size": str(settings.kv.page_size),
        "context_length": str(context.length),
        "layout": spec.kv_layout(settings.dtype, settings.kv.page_size, 0, 1).digest.hex(),
    }


def shared_settings(settings: Settings, model: str) -> dict[str, Any]:
    """What a host that joins by a token takes over; `model` is how another machine may find the model."""
    kv = {"page_size": settings.kv.page_size, "pages": settings.kv.pages, "memory": settings.kv.memory}
    given = {name: msgspec.to_builtins(getattr(settings, name)) for name in _SHARED}
    given |= {"model": model, "kv": {name: value for name, value in kv.items() if value is not None}}
    given["hosts"] = msgspec.to_builtins(settings.hosts)
    return {name: value for name, value in given.items() if value is not None}
