"""Which class computes which architecture."""

from typing import Final

from nodes.worker.errors import BackendMissing
from nodes.worker.models.llama import Llama
from nodes.worker.models.mistral import Mistral
from nodes.worker.models.qwen2 import Qwen2
from nodes.worker.models.qwen3 import Qwen3

MODELS: Final[dict[str, type[Llama]]] = {"llama": Llama, "mistral": Mistral, "qwen2": Qwen2, "qwen3": Qwen3}


def model_class(architecture: str) -> type[Llama]:
    """The class for `ModelSpec.architecture`. Raises BackendMissing."""
    found = MODELS.get(architecture)
    if found is None:
        raise BackendMissing(f"no code here computes {architecture!r}; known are {', '.join(MODELS)}")
    return found
