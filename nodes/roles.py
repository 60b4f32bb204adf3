"""What all roles have in common besides messages: their names, topics, and the codec of the node protocol."""

from typing import Final

from mesh.codec import Codec
from mesh.message import Part
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


class SchedulerAttributes(Part, frozen=True):
    """What a scheduler announces of itself to the registry, for routing: `Member.attributes` of a scheduler.

    `worker_ready` is false while its worker is being replaced: it takes requests, and they wait.
    """

    group: str = ""
    phase: str = "mixed"
    page_size: int = 16
    worker_ready: bool = True
