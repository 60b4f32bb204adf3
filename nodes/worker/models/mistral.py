"""Mistral: Llama whose every layer may have a sliding window (`ModelSpec.layer_windows`)."""

from nodes.worker.models.llama import Llama


class Mistral(Llama):
    """The network is Llama's; the window is the attention backend's."""
