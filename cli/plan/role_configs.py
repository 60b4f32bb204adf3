"""The roles that a mesh is made of, and what can be set for each: fields that `[roles.ROLE]` overrides. Pure."""

from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from cli.errors import BadConfig
from cli.plan.faults import Fault, find_fault, unknown_name
from cli.plan.settings import Settings
from nodes import roles
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.config import GatewayConfig
from nodes.kv_agent.config import KVAgentConfig
from nodes.registry.config import RegistryConfig
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.config import WorkerConfig

_Config = TypeVar("_Config", bound=msgspec.Struct)


class BuiltIn(NamedTuple):
    """A role that ships with the package: its configuration, its actor's module and class, and when it drains.

    Roles that hold clients drain first (tier 0), roles that others need in order to finish drain later.
    """

    config: type[msgspec.Struct]
    module: str
    actor: str
    drain_tier: int


BUILT_IN: Final = {
    roles.GATEWAY: BuiltIn(GatewayConfig, "nodes.gateway.actor", "Gateway", 0),
    roles.TOKENIZER: BuiltIn(TokenizerConfig, "nodes.tokenizer.actor", "TokenizerActor", 2),
    roles.SCHEDULER: BuiltIn(SchedulerConfig, "nodes.scheduler.actor", "SchedulerActor", 1),
    roles.WORKER: BuiltIn(WorkerConfig, "nodes.worker.actor", "WorkerActor", 2),
    roles.DETOKENIZER: BuiltIn(DetokenizerConfig, "nodes.detokenizer.actor", "DetokenizerActor", 2),
    # After the workers: memory on a device must not be freed while another process still has it mapped.
    roles.KV_AGENT: BuiltIn(KVAgentConfig, "nodes.kv_agent.actor", "KVAgent", 3),
    roles.REGISTRY: BuiltIn(RegistryConfig, "nodes.registry.actor", "RegistryActor", 4),
}
CONFIG_TYPES: Final = {role: built_in.config for role, built_in in BUILT_IN.items()}

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


def check_config(role: str, fields: dict[str, Any]) -> msgspec.Struct:
    """The typed configuration of a role. Raises BadConfig."""
    if role not in CONFIG_TYPES:
        fault = unknown_name(role, CONFIG_TYPES, "role")
        raise BadConfig(f"there is no role {role}", why="it is not one of the roles in a mesh", do=fault.do)
    config_type = CONFIG_TYPES[role]
    fault = find_fault(fields, config_type, strict=False)
    missing = [field.name for field in msgspec.structs.fields(config_type) if field.required]
    missing = [name for name in missing if name not in fields]
    if missing:
        fault = Fault(
            f"{', '.join(missing)} is not given", "give it (`meshctl up --dry-run` prints complete command lines)"
        )
    if fault is None:
        try:
            return msgspec.convert(fields, config_type, strict=False)
        except ValueError as error:
            # Each field is right by itself, but not together with others.
            fault = Fault(str(error), "correct it")
    raise BadConfig(f"the configuration of a {role} cannot be used", why=fault.why, do=fault.do)


def typed_roles(roles: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`[roles]`, which has been checked, with the type of its field for each value: the environment has strings only.

    Values that are not strings stay as they are: a table would be filled in with what nobody has set.
    """
    return {role: {name: _typed(role, name, value) for name, value in fields.items()} for role, fields in roles.items()}


def _typed(role: str, name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    types = {field.encode_name: field.type for field in msgspec.structs.fields(CONFIG_TYPES[role])}
    return msgspec.to_builtins(msgspec.convert(value, types[name], strict=False))
