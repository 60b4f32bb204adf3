"""Qwen3: Llama with an RMS norm on each head of queries and keys before the rotary embedding."""

from typing import ClassVar

from nodes.worker.models.llama import Llama


class Qwen3(Llama):
    """The network is Llama's but for the norms."""

    has_qk_norm: ClassVar[bool] = True
