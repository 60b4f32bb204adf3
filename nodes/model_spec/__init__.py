"""Describes a model without its weights: shape, tokenizer, chat template, KV layout.

`describe_model` is called by tokenizer and detokenizer, `resolve_model` by the worker; `meshctl up` does both before it
starts anything. Needs no torch; `nodes.model_spec.vocabulary` loads the tokenizer itself.
"""

from nodes.model_spec.pooling_choice import PoolingChoice
from nodes.model_spec.resolve import describe_model, known_models, resolve_model
from nodes.models.errors import (
    ModelDamaged,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    TensorParallelUnfit,
    WeightsChanged,
)
from nodes.models.spec import EchoTimings, ModelSpec, Quantization, RopeParameters, WeightsRead

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
    "WeightsChanged",
    "WeightsRead",
    "describe_model",
    "known_models",
    "resolve_model",
]
