"""What all roles have in common besides messages: their names, topics, and the codec of the node protocol."""

from typing import Final

from mesh.codec import Codec
from nodes.protocol import HotNodeMessage, NodeMessage

GATEWAY: Final = "gateway"
TOKENIZER: Final = "tokenizer"
SCHEDULER: Final = "scheduler"
WORKER: Final = "worker"
DETOKENIZER: Final = "detokenizer"
KV_AGENT: Final = "kv_agent"
REGISTRY: Final = "registry"

KV_EVENTS_TOPIC: Final = "kv_events"
LOAD_TOPIC: Final = "load"

NODE_CODEC: Final = Codec(NodeMessage, HotNodeMessage)
