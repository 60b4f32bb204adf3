"""What can be set of each role: one configuration type each, whose fields `[roles.ROLE]` overrides."""

from typing import Final

import msgspec

from nodes import roles
from nodes.detokenizer.config import DetokenizerConfig
from nodes.gateway.config import GatewayConfig
from nodes.kv_agent.config import KVAgentConfig
from nodes.registry.config import RegistryConfig
from nodes.scheduler.config import SchedulerConfig
from nodes.tokenizer.config import TokenizerConfig
from nodes.worker.config import WorkerConfig

CONFIG_TYPES: Final[dict[str, type[msgspec.Struct]]] = {
    roles.GATEWAY: GatewayConfig,
    roles.TOKENIZER: TokenizerConfig,
    roles.SCHEDULER: SchedulerConfig,
    roles.WORKER: WorkerConfig,
    roles.DETOKENIZER: DetokenizerConfig,
    roles.KV_AGENT: KVAgentConfig,
    roles.REGISTRY: RegistryConfig,
}

_GROUPS: Final = "prefill, decode, mixed and tp"
PLANNED: Final = {
    "agent": _GROUPS,
    "aliases": "served_name",
    "chat_template": "chat_template",
    "context": "context_length",
    "context_length": "context_length",
    "directory": "kv.directory",
    "group": _GROUPS,
    "host": "host",
    "model": "model",
    "model_name": "served_name",
    "page_size": "kv.page_size",
    "phase": _GROUPS,
    "pools": "kv.memory or kv.pages",
    "port": "port",
    "prefix": "name",
    "quantization": "quantize",
    "quantize": "quantize",
    "reuse_port": "gateways",
    "tp_rank": _GROUPS,
    "tp_size": _GROUPS,
    "vocab_size": "model",
    "worker": _GROUPS,
    "workers": _GROUPS,
}
"""Fields in which several actors, or actors and supervisor, have to agree, and the setting that decides for all."""
