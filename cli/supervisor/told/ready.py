"""What a user sees at the end of a good start, and can paste. Pure."""

from typing import Final

from cli.plan.keys import links_note
from cli.plan.topology import Topology

_PAIR: Final = '"query": "a fruit", "documents": ["an apple", "a stone"]'
_EXAMPLES: Final = {
    # Greedy: at the default temperature of 1 the bundled model answers 72 or 92 one time in 20.
    "": ("/v1/chat/completions", '"temperature": 0, "messages": [{"role": "user", "content": "What is 37 + 45?"}]'),
    "embedding": ("/v1/embeddings", '"input": "What is 37 + 45?"'),
    "classify": ("/classify", '"input": "What is 37 + 45?"'),
    "score": ("/rerank", _PAIR),
    "yes_no": ("/rerank", _PAIR),
}
"""Path and fields of a first request, by what a model makes instead of text."""


def ready_text(topology: Topology, seconds: float, note: str) -> str:
    """Of a host with a gateway. `note` says what, if anything, makes its weights differ from the model's or slows it
    down, and on several hosts how links between them are protected.
    """
    settings, url, vectors, name = topology.settings, topology.url, topology.vectors, _name(topology)
    path, fields = _EXAMPLES[vectors]
    body = f'{{"model": "{topology.model_name}", {fields}}}'
    key = ' -H "authorization: Bearer $KVMESH_API_KEY"' if settings.api_key_file else ""
    return (
        f"ready at {url} in {seconds:.1f} s\n{topology.limits}\n{note + chr(10) if note else ''}\n"
        f"  curl {url}{path} -H 'content-type: application/json'{key} \\\n"
        f"    -d '{body}'\n"
        f"{'' if vectors else f'  meshctl chat{name}{chr(10)}'}"
        f"  meshctl ps{name}\n"
    )


def ready_text_elsewhere(topology: Topology, seconds: float, registry: str) -> str:
    """As `ready_text`, for a host without a gateway; `registry` is where the registry listens."""
    settings, there = topology.settings, topology.gateway_host
    on = f" on host {there}" if there else ""
    return (
        f"host {settings.on} of the mesh {settings.name} is ready in {seconds:.1f} s\n"
        f"registry at {registry}, clients connect to {topology.url}{on}\n{links_note(settings)}\n\n"
        f"  meshctl ps{_name(topology)}\n"
    )


def _name(topology: Topology) -> str:
    name = topology.settings.name
    return "" if name == "default" else f" --name {name}"
