"""Settings of one worker. Made by `cli` from the topology."""

from typing import Literal

import msgspec

from kvstore.pool.device import CPU
from nodes.model_spec import ModelSpec, PoolingChoice, Quantization, WeightsRead, resolve_model


class ConfigError(ValueError):
    """A setting contradicts another one; the message says which and what to set."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of `group`, computing `model` (see `nodes.model_spec.resolve_model`) over the pool of `agent`.

    `dtype` is `auto` (the model's own), `float32` or `bfloat16`. `num_threads` 0 leaves torch's own choice.
    `max_batch_tokens` bounds the tokens of one step, and with them the memory of activations.

    `end_token_ids` are those that end an answer, with what the tokenizer's files say; empty: what the configs say.

    `pooling` says how vectors are made, as `--pooling` has it. `weights` is what was read of the model's files when the
    mesh was planned: the worker reads them itself if that is not known, or if they have changed since.

    `quantize` rounds weights to `int8` when they are loaded; only for one rank alone, on the CPU.

    `context_length` is the requested length, which may be more than config.json's and selects how LongRoPE and dynamic
    RoPE rotate (`ModelSpec.within`); 0: none requested.

    `device` is `cpu`, `cuda` or `cuda:N`; the rest of this paragraph concerns CUDA. `deterministic` splits no
    sequence and computes products in tiles of fixed rows, at a cost in speed. `mem_fraction` is the share of the
    device's memory that weights, activations and pool may take together. With `memory_saver` weights lie in memory that
    can be released, with a copy in the host's memory meanwhile (torch-memory-saver).

    `tp_size` > 1: the worker is rank `tp_rank` of a group that computes one model together, each on a part of it (see
    `nodes.models.tensor_parallel`), over a pool of its own. All ranks get the same steps. `workers` are the actor ids
    of all ranks, by rank. If another scheduler's adoption waits too long for a step, the worker concludes that another
    rank never got that step.
    """

    group: str
    model: str
    agent: str
    dtype: str = "auto"
    quantize: Quantization = "none"
    context_length: int = 0
    page_size: int = 16
    num_threads: int = 0
    kernels: Literal["auto", "avx512_bf16", "avx512", "avx2", "torch"] = "auto"
    """What computes on the CPU: one build of the project's own kernels, `torch`, or `auto`.

    By default the best build that this CPU can run, or torch if there is none."""
    max_batch_tokens: int = 2048
    device: str = "cpu"
    attention: Literal["auto", "flashinfer", "torch"] = "auto"
    """On CUDA: `auto` (FlashInfer if it supports the model), `flashinfer` or `torch`."""
    cuda_graphs: bool = True
    """On CUDA: decode steps are replayed."""
    deterministic: bool = False
    mem_fraction: float = 0.9
    memory_saver: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    workers: tuple[str, ...] = ()
    adopt_grace_s: float = 10.0
    """How long another scheduler waits for a step of ranks, before they form a new group."""
    map_retry_s: float = 0.2
    """Between asks for a pool that is not there yet."""
    end_token_ids: tuple[int, ...] = ()
    pooling: PoolingChoice = "auto"
    weights: WeightsRead | None = None

    def spec(self) -> ModelSpec:
        """The model as this worker computes it. May read all weights. Raises ModelError."""
        spec = resolve_model(self.model, self.pooling, self.weights)
        spec = spec.within(self.context_length).quantized(self.quantize)
        return msgspec.structs.replace(spec, eos_token_ids=self.end_token_ids) if self.end_token_ids else spec

    def __post_init__(self) -> None:
        if self.quantize != "none" and (self.device != CPU or self.tp_size > 1):
            raise ConfigError(f"{self.quantize} weights need the CPU and a single rank: set quantize to none")
        if self.tp_size > 1 and len(set(self.workers)) != self.tp_size:
            raise ConfigError(
                f"workers must name {self.tp_size} different ranks, not {', '.join(self.workers) or 'none'}"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"there is no rank {self.tp_rank} in a group of {self.tp_size}")
