"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values (`ModelSpec.qkv_bias`)."""

from nodes.worker.models.llama import Llama


class Qwen2(Llama):
    """The network is Llama's; the biases are in its weights."""
