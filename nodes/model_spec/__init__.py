"""Describes a model without its weights: shape, tokenizer, chat template, KV layout.

`resolve_model` is called by tokenizer, detokenizer and worker, and by `meshctl up` before it starts anything. Needs no
torch; `nodes.model_spec.vocabulary` loads the tokenizer itself.
"""

from nodes.model_spec.pooling_choice import PoolingChoice
from nodes.model_spec.resolve import known_models, resolve_model
from nodes.models.errors import ModelDamaged, ModelError, ModelNotFound, ModelUnsupported, TensorParallelUnfit
from nodes.models.spec import EchoTimings, ModelSpec, Quantization, RopeParameters

__all__ = [
    "EchoTimings",
    "ModelDamaged",
    "ModelError",
    "ModelNotFound",
    "ModelSpec",
    "ModelUnsupported",
    "PoolingChoice",
    "Quantization",
    "RopeParameters",
    "TensorParallelUnfit",
    "known_models",
    "resolve_model",
]
