"""What decides a field in the configuration of a role: the plan, or the setting of its name, then `[roles.ROLE]`."""

from typing import Any, Final, TypeVar

import msgspec

from cli.errors import BadConfig
from cli.plan.role_configs import check_config
from cli.plan.settings import Settings

_Config = TypeVar("_Config", bound=msgspec.Struct)

_OF_ONE_ROLE: Final = frozenset(
    {
        "cors_origins", "deterministic", "device", "dtype", "local_prefill_max", "max_running", "mem_fraction",
        "memory_saver", "otel_endpoint", "trusted_proxies",
    }
)  # fmt: skip
"""Settings that no other actor depends on, so that a role may have others than the mesh."""
_FOLLOWING: Final = {
    "gateways": ("reuse_port",),
    "kv.directory": ("directory",),
    "kv.disk": ("disk",),
    "kv.disk or kv.store": ("stores",),
    "kv.memory or kv.pages": ("pools",),
    "kv.page_size": ("page_size",),
    "kv.store": ("store",),
    "context_length": ("context",),
    "model": ("fill_in", "hidden_size", "makes_text", "vocab_size"),
    "model or chat_template": ("template_reads",),
    "name": ("prefix", "request_log_folder", "responses_file"),
    "prefill, decode, mixed and tp": ("agent", "group", "phase", "tp_rank", "tp_size", "worker", "workers"),
    "quantize": ("quantization",),
    "responses_store": ("responses_store_bytes",),
    "served_name": ("aliases", "model_name"),
}
PLANNED: Final = {name: name for name in Settings.__struct_fields__ if name not in _OF_ONE_ROLE} | {
    name: setting for setting, names in _FOLLOWING.items() for name in names
}
"""Fields on which several actors, or actors and supervisor, must agree, and the setting that decides each for all."""


def configured(kind: type[_Config], settings: Settings, **planned: Any) -> _Config:
    """A role's configuration: what is planned, and of the rest what the setting of the same name says, if anything."""
    given = {name: getattr(settings, name) for name in kind.__struct_fields__ if name in Settings.__struct_fields__}
    return kind(**{name: value for name, value in given.items() if value is not None} | planned)


def overlay(role: str, config: msgspec.Struct, overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that differ from the defaults, as plain data, with the user's own on top."""
    fields = {
        field.name: msgspec.to_builtins(getattr(config, field.name))
        for field in msgspec.structs.fields(config)
        if field.required or getattr(config, field.name) != field.default
    }
    for name in overrides:
        # A gateway on another port than the one that `ps` and `up` check would never be ready for them.
        if name in PLANNED and name in config.__struct_fields__:
            raise BadConfig(
                f"{name} cannot be set in [roles.{role}]",
                why="other actors depend on it",
                do=f"remove it; it is set for the whole mesh by {PLANNED[name]}",
            )
    # The environment has strings only.
    given = check_config(role, fields | overrides)
    return fields | {name: msgspec.to_builtins(getattr(given, name)) for name in overrides}
