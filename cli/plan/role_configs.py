"""The roles that a mesh is made of, and the configuration of each. Pure.

Every actor imports this, and no settings: `cli/plan/overrides.py` brings both together.
"""

from typing import Any, Final, NamedTuple

import msgspec

from cli.errors import BadConfig
from cli.plan.faults import Fault, find_fault, unknown_name
from nodes import roles
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.config import GatewayConfig
from nodes.kv_agent.config import KVAgentConfig
from nodes.registry.config import RegistryConfig
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.config import WorkerConfig


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
